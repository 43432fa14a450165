"""What a MiMo-V2 checkpoint holds of its towers: names and shapes, as modules without a forward."""

from __future__ import annotations

from torch import nn

from encoder_svc.models.mimo_v2_config import MergerNorm, MimoAudio, MimoTokenizer, MimoVision
from encoder_svc.models.qwen_vision_parameters import PatchEmbed


class GatedPerceptron(nn.Module):
    """``down(up(x) · SiLU(gate(x)))``."""

    def __init__(self, width: int, intermediate: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=bias)
        self.up_proj = nn.Linear(width, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, width, bias=bias)


class VisionAttention(nn.Module):
    """Queries, keys and values in one layer, the output, and the sinks of a banded block."""

    def __init__(self, config: MimoVision, block: int) -> None:
        super().__init__()
        size, heads, key_heads = config.qk_channels, config.num_heads, config.num_key_value_heads
        self.qkv = nn.Linear(config.hidden_size, (heads + 2 * key_heads) * size)
        self.proj = nn.Linear(heads * size, config.hidden_size)
        if config.use_sink and not config.is_full(block):
            self.sinks = nn.Parameter(self.proj.weight.new_empty(heads))


class VisionBlock(nn.Module):
    """One layer."""

    def __init__(self, config: MimoVision, block: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size)
        self.norm2 = nn.RMSNorm(config.hidden_size)
        self.attn = VisionAttention(config, block)
        self.mlp = GatedPerceptron(config.hidden_size, config.intermediate_size, bias=True)


class Merger(nn.Module):
    """The projector: it makes one row of a merge block."""

    def __init__(self, config: MimoVision) -> None:
        super().__init__()
        layer_norm = config.merger_norm is MergerNorm.LAYER_NORM
        self.ln_q = nn.LayerNorm(config.hidden_size, bias=False) if layer_norm else nn.RMSNorm(config.hidden_size)
        merged = config.hidden_size * config.spatial_merge_size**2
        self.mlp = nn.Sequential(
            nn.Linear(merged, merged, bias=False), nn.GELU(), nn.Linear(merged, config.out_hidden_size, bias=False)
        )


class VisionTower(nn.Module):
    """``visual.*`` or ``vision_model.*``.

    Args:
        config: of the tower.
    """

    def __init__(self, config: MimoVision) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config, bias=False)
        self.blocks = nn.ModuleList(VisionBlock(config, block) for block in range(config.depth))
        self.merger = Merger(config)


class LocalAttention(nn.Module):
    """Of the local transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width, bias=False)


class LocalLayer(nn.Module):
    """One layer, as Qwen2 has them."""

    def __init__(self, config: MimoAudio) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.input_local_dim)
        self.self_attn = LocalAttention(config.input_local_dim)
        self.post_attention_layernorm = nn.RMSNorm(config.input_local_dim)
        self.mlp = GatedPerceptron(config.input_local_dim, config.input_local_intermediate_size, bias=False)


class LocalTransformer(nn.Module):
    """Over the time steps of a group."""

    def __init__(self, config: MimoAudio) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LocalLayer(config) for _ in range(config.input_local_layers))
        if config.add_post_norm:
            self.norm = nn.RMSNorm(config.input_local_dim)


class Projection(nn.Module):
    """A group → one row, in two layers."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, out, bias=False)
        )


class AudioEncoder(nn.Module):
    """``audio_encoder.*``."""

    def __init__(self, config: MimoAudio) -> None:
        super().__init__()
        self.input_local_transformer = LocalTransformer(config)
        group = config.input_local_dim * config.group_size
        self.projection = (
            nn.Linear(group, config.out_hidden_size, bias=False)
            if config.projection_layers == 1
            else Projection(group, config.out_hidden_size)
        )


class SpeechTower(nn.Module):
    """``audio_encoder.*`` and ``speech_embeddings.*``.

    Args:
        config: of the tower.
    """

    def __init__(self, config: MimoAudio) -> None:
        super().__init__()
        self.audio_encoder = AudioEncoder(config)
        self.speech_embeddings = nn.ModuleList(
            nn.Embedding(size, config.input_local_dim) for size in config.table_sizes
        )


class TokenizerAttention(nn.Module):
    """Keys have no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)


class TokenizerLayer(nn.Module):
    """One layer."""

    def __init__(self, config: MimoTokenizer) -> None:
        super().__init__()
        self.self_attn = TokenizerAttention(config.d_model)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)


class Codebook(nn.Module):
    """The entries of one codebook. What training kept beside them is not read."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = nn.ParameterDict({"embed": nn.Embedding(size, width).weight})


class Quantizer(nn.Module):
    """The codebooks."""

    def __init__(self, config: MimoTokenizer) -> None:
        super().__init__()
        self.vq = nn.Module()
        self.vq.layers = nn.ModuleList(Codebook(size, config.d_model) for size in config.codebook_sizes)


class TokenizerEncoder(nn.Module):
    """``encoder.*`` of the folder ``audio_tokenizer/``.

    Args:
        config: of the tokenizer.
    """

    def __init__(self, config: MimoTokenizer) -> None:
        super().__init__()
        width = config.d_model
        self.conv1 = nn.Conv1d(config.n_mels, width, config.kernel_size, padding=1)
        self.conv2 = nn.Conv1d(width, width, config.kernel_size, stride=config.stride_size, padding=1)
        self.layers = nn.ModuleList(TokenizerLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(width)
        if config.avg_pooler != 1:
            pooler = nn.Conv1d(width, width, config.avg_pooler, config.avg_pooler, bias=False)
            self.down_sample_layer = nn.Sequential(pooler, nn.GELU())
            self.down_sample_norm = nn.LayerNorm(width)
        self.quantizer = Quantizer(config)
