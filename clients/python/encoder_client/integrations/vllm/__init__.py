"""vLLM as a language-only worker: an encoder-cache connector that it loads by ``--ec-transfer-config``.

docs/vllm.md shows how; :mod:`~encoder_client.integrations.vllm.connector` is what vLLM is pointed at.
"""
