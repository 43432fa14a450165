"""Positions of the Omni families where some videos of a prompt sound and others do not.

transformers has one switch for all videos of a prompt, ``use_audio_in_video``; with it, a silent video is taken for one
that sounds, and everything behind it moves. Positions are told from left to right, and each item's begin behind the one
before. So a mixed prompt is cut before its videos, and the rule of transformers runs on each piece.
"""

from __future__ import annotations

from typing import Any

import torch


class MixedSoundPositions:
    """Stands before the class of transformers whose ``get_rope_index`` it calls."""

    config: Any

    def get_rope_index(
        self,
        input_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        use_audio_in_video: bool = False,
        audio_seqlens: torch.Tensor | None = None,
        second_per_grids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and what they are ahead of the number of tokens, as the class has it.

        Args:
            input_ids: shape (batch, tokens); the rows of a mixed prompt are all alike, without padding.
            image_grid_thw: shape (images, 3).
            video_grid_thw: shape (videos, 3).
            attention_mask: shape (batch, tokens).
            use_audio_in_video: some video sounds.
            audio_seqlens: mel frames of each sound, alone or of a video, in the order of the prompt.
            second_per_grids: seconds of a temporal step, for each video.

        Returns:
            Shapes (3, batch, tokens) and (batch, 1).
        """
        whole: Any = super().get_rope_index  # type: ignore[misc] # the class that follows has it
        ids = input_ids[0]
        begins = self._videos(ids)
        sounding = [bool(ids[begin + 1] == self.config.audio_start_token_id) for begin in begins]
        if not use_audio_in_video or all(sounding):
            answer: tuple[torch.Tensor, torch.Tensor] = whole(
                input_ids, image_grid_thw, video_grid_thw, attention_mask,
                use_audio_in_video, audio_seqlens, second_per_grids,
            )  # fmt: skip
            return answer
        pieces: list[torch.Tensor] = []
        images = sounds = 0
        end = torch.zeros((), dtype=torch.int64, device=ids.device)
        for video, piece in enumerate(ids.tensor_split(begins[1:])):
            shown = self._count(piece, self.config.vision_start_token_id, self.config.image_token_id)
            heard = int((piece == self.config.audio_start_token_id).sum())
            positions, _ = whole(
                piece[None],
                image_grid_thw[images : images + shown] if image_grid_thw is not None and shown else None,
                video_grid_thw[video : video + 1] if video_grid_thw is not None else None,
                torch.ones_like(piece)[None],
                sounding[video],
                audio_seqlens[sounds : sounds + heard] if audio_seqlens is not None else None,
                second_per_grids[video : video + 1] if second_per_grids is not None else None,
            )
            pieces.append(positions + end)
            end = pieces[-1].max() + 1
            images, sounds = images + shown, sounds + heard
        positions = torch.cat(pieces, dim=-1).expand(-1, len(input_ids), -1)
        return positions, (end - len(ids)).expand(len(input_ids), 1)

    def _videos(self, ids: torch.Tensor) -> list[int]:
        """Where videos begin."""
        begins, following = ids[:-1] == self.config.vision_start_token_id, ids[1:]
        seen = (following == self.config.video_token_id) | (following == self.config.audio_start_token_id)
        found: list[int] = (begins & seen).nonzero()[:, 0].tolist()
        return found

    @staticmethod
    def _count(ids: torch.Tensor, first: int, second: int) -> int:
        """How often a token follows another one."""
        return int(((ids[:-1] == first) & (ids[1:] == second)).sum())
