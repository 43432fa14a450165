"""The brain of the service, free of gRPC and torch: who asked for what, where it is, and what happens next."""
