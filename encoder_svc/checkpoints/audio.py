"""Recipes of the families that hear."""

from __future__ import annotations

from encoder_svc.checkpoints.audio_config import audio_encoder, feature_extractor
from encoder_svc.checkpoints.language_config import architecture, language
from encoder_svc.checkpoints.recipe import Chat, Json, Recipe, Vocabulary, chat_ml
from encoder_svc.checkpoints.sizes import Sizes

_QWEN2_AUDIO = Vocabulary(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    end="<|im_end|>",
    pad="<|endoftext|>",
    chat=chat_ml({"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>\n"}, "You are a helpful assistant."),
    processor="Qwen2AudioProcessor",
    tokenizer="Qwen2Tokenizer",
)
_VOXTRAL = Vocabulary(
    special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]", "<pad>"),
    end="</s>",
    pad="<pad>",
    begin="<s>",
    chat=Chat(
        system=("[INST]", "[/INST]"),
        user=("[INST]", "[/INST]"),
        assistant=("", "</s>"),
        media={"audio": "[BEGIN_AUDIO][AUDIO]"},
        begin="<s>",
    ),
    processor="VoxtralProcessor",
)
_AUDIO_FLAMINGO = Vocabulary(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<sound>"),
    end="<|im_end|>",
    pad="<|endoftext|>",
    chat=chat_ml({"audio": "<sound>"}, "You are a helpful assistant."),
    processor="AudioFlamingo3Processor",
    tokenizer="Qwen2Tokenizer",
)
_GLM_ASR = Vocabulary(
    special=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|pad|>"),
    end="<|user|>",
    pad="<|endoftext|>",
    chat=Chat(
        system=("", "\n"),
        user=("<|user|>\n", ""),
        assistant=("<|assistant|>\n", ""),
        media={"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"},
    ),
    processor="GlmAsrProcessor",
)
_WHISPER = Vocabulary(
    special=(
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|translate|>",
        "<|transcribe|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ),
    end="<|endoftext|>",
    pad="<|endoftext|>",
    begin="<|endoftext|>",
    processor="WhisperProcessor",
)


def _qwen2_audio(sizes: Sizes, words: Vocabulary) -> Json:
    text = language("qwen2", sizes, words)
    del text["head_dim"]
    return {
        **architecture("Qwen2AudioForConditionalGeneration", "qwen2_audio"),
        "audio_config": audio_encoder("qwen2_audio_encoder", sizes),
        "audio_token_index": words.ids["<|AUDIO|>"],
        "text_config": text,
        "vocab_size": words.size,
    }


def _voxtral(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("VoxtralForConditionalGeneration", "voxtral"),
        "audio_config": {
            "model_type": "voxtral_encoder",
            "activation_function": "gelu",
            "hidden_size": sizes.tower_hidden,
            "intermediate_size": 4 * sizes.tower_hidden,
            "max_source_positions": 1500,
            "num_attention_heads": sizes.tower_heads,
            "num_hidden_layers": sizes.tower_layers,
            "num_mel_bins": 128,
            "scale_embedding": False,
        },
        "audio_token_id": words.ids["[AUDIO]"],
        "hidden_size": sizes.hidden,
        "projector_hidden_act": "gelu",
        "text_config": language("llama", sizes, words),
        "vocab_size": words.size,
    }


def _audioflamingo3(sizes: Sizes, words: Vocabulary) -> Json:
    text = language("qwen2", sizes, words)
    del text["head_dim"]
    return {
        **architecture("AudioFlamingo3ForConditionalGeneration", "audioflamingo3"),
        "audio_config": audio_encoder("audioflamingo3_encoder", sizes),
        "audio_token_id": words.ids["<sound>"],
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": text,
    }


def _glmasr(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("GlmAsrForConditionalGeneration", "glmasr"),
        "audio_config": {
            "model_type": "glmasr_encoder",
            "hidden_act": "gelu",
            "hidden_size": sizes.tower_hidden,
            "intermediate_size": 4 * sizes.tower_hidden,
            "max_position_embeddings": 1500,
            "num_attention_heads": sizes.tower_heads,
            "num_hidden_layers": sizes.tower_layers,
            "num_mel_bins": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        "audio_token_id": words.ids["<|pad|>"],
        "projector_hidden_act": "gelu",
        "text_config": language("llama", sizes, words),
    }


def _whisper(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    start = ids["<|startoftranscript|>"]
    return {
        **architecture("WhisperForConditionalGeneration", "whisper"),
        **audio_encoder("whisper", sizes, num_mel_bins=80),
        "bos_token_id": ids["<|endoftext|>"],
        "begin_suppress_tokens": [ord(" "), ids["<|endoftext|>"]],
        "decoder_attention_heads": sizes.tower_heads,
        "decoder_ffn_dim": sizes.tower_intermediate,
        "decoder_layers": sizes.layers,
        "decoder_start_token_id": start,
        "eos_token_id": ids["<|endoftext|>"],
        "is_encoder_decoder": True,
        "max_target_positions": 448,
        "num_hidden_layers": sizes.tower_layers,
        "pad_token_id": ids["<|endoftext|>"],
        "suppress_tokens": [],
        "tie_word_embeddings": True,
        "vocab_size": words.size,
    }


AUDIO_RECIPES: dict[str, Recipe] = {
    "qwen2_audio": Recipe(
        _QWEN2_AUDIO, _qwen2_audio, {"preprocessor_config.json": feature_extractor("Qwen2AudioProcessor")}
    ),
    "voxtral": Recipe(_VOXTRAL, _voxtral, {"preprocessor_config.json": feature_extractor("VoxtralProcessor")}),
    "audioflamingo3": Recipe(
        _AUDIO_FLAMINGO, _audioflamingo3, {"preprocessor_config.json": feature_extractor("AudioFlamingo3Processor")}
    ),
    "glmasr": Recipe(_GLM_ASR, _glmasr, {"preprocessor_config.json": feature_extractor("GlmAsrProcessor")}),
    "whisper": Recipe(
        _WHISPER,
        _whisper,
        {"preprocessor_config.json": feature_extractor("WhisperProcessor", bins=80, return_attention_mask=False)},
        shards=1,
        tied=True,
    ),
}
