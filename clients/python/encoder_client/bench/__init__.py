"""``encoder-client bench``: engines with towers of their own beside engines that take embeddings from encoders."""
