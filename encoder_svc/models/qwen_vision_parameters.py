"""What a checkpoint holds of a Qwen-VL vision tower: names and shapes, as modules without values.

They are named as transformers names them and have no forward: :mod:`~encoder_svc.models.qwen_vision_tower` takes the
weights from them. With them an engine loads these families without importing transformers, which takes longer than all
else of its start.
"""

from __future__ import annotations

from torch import nn

from encoder_svc.models.qwen_vision_config import Qwen2Vision, Qwen3Vision, Qwen25Vision, Qwen35Vision, VisionConfig

CHANNELS = 3


class Attention(nn.Module):
    """Queries, keys and values in one layer, and the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class Block(nn.Module):
    """One layer.

    Args:
        config: of the tower.
        norm: makes a normalisation of a width.
        perceptron: the names of its layers and their sizes, (in, out).
    """

    def __init__(self, config: VisionConfig, norm: type[nn.Module], perceptron: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(config.tower_width), norm(config.tower_width)
        self.attn = Attention(config.tower_width, config.num_heads)
        self.mlp = nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in perceptron.items()})


class PatchEmbed(nn.Module):
    """The convolution that patches come in by."""

    def __init__(self, config: VisionConfig, *, bias: bool) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(CHANNELS, config.tower_width, kernel, stride=kernel, bias=bias)


class Merger(nn.Module):
    """The projector: it makes one row of a merge block.

    Args:
        config: of the tower.
        norm: makes a normalisation of a width.
        in_sequence: its layers are numbered and not named, as in Qwen2-VL and Omni.
        normalises_blocks: it normalises a block of patches and not each patch.
    """

    def __init__(
        self, config: VisionConfig, norm: type[nn.Module], *, in_sequence: bool, normalises_blocks: bool = False
    ) -> None:
        super().__init__()
        self.use_postshuffle_norm = normalises_blocks
        merged = config.tower_width * config.spatial_merge_size**2
        layers = nn.Linear(merged, merged), nn.Linear(merged, config.row_width)
        normalisation = norm(merged if normalises_blocks else config.tower_width)
        if in_sequence:
            self.ln_q = normalisation
            self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1])
        else:
            self.norm = normalisation
            self.linear_fc1, self.linear_fc2 = layers


class VisionTower(nn.Module):
    """All of it.

    Args:
        config: of the tower: its class decides what the tower has.
        of_omni: with the names of Qwen3-Omni, where they are not those of Qwen3-VL.
    """

    def __init__(self, config: VisionConfig, *, of_omni: bool = False) -> None:
        super().__init__()
        width = config.tower_width
        norm: type[nn.Module] = nn.LayerNorm
        if isinstance(config, Qwen25Vision):
            norm = nn.RMSNorm
            inside = config.intermediate_size
            perceptron = {"gate_proj": (width, inside), "up_proj": (width, inside), "down_proj": (inside, width)}
        elif isinstance(config, Qwen35Vision):
            inside = config.intermediate_size
            perceptron = {"linear_fc1": (width, inside), "linear_fc2": (inside, width)}
            self.pos_embed = nn.Embedding(config.num_position_embeddings, width)
        else:
            assert isinstance(config, Qwen2Vision)
            inside = int(width * config.mlp_ratio)
            perceptron = {"fc1": (width, inside), "fc2": (inside, width)}
        in_sequence = of_omni or not isinstance(config, Qwen35Vision)
        self.patch_embed = PatchEmbed(config, bias=isinstance(config, Qwen35Vision))
        self.blocks = nn.ModuleList(Block(config, norm, perceptron) for _ in range(config.depth))
        self.merger = Merger(config, norm, in_sequence=in_sequence)
        if isinstance(config, Qwen3Vision):
            mergers = nn.ModuleList(
                Merger(config, norm, in_sequence=in_sequence, normalises_blocks=True) for _ in range(config.levels)
            )
            setattr(self, "merger_list" if of_omni else "deepstack_merger_list", mergers)
