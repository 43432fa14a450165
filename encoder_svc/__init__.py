"""A gRPC-first encoder service for Encode-Prefill-Decode serving of multimodal language models."""

__version__ = "0.1.0"
