"""An HTTP proxy before a language-only vLLM: it takes the media out of chat requests and has them encoded elsewhere."""
