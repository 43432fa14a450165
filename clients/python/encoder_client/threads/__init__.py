"""The client for programs that drive it from threads and may never wait."""
