"""Train megatron-core's CLIP vision encoder under Megatron-FSDP, with a linear classifier or a language model."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.trainings.case import VOCABULARY, Case
from tests.support.trainings.models import gpt_layer_spec
from tests.support.trainings.training import Training

PATCH, CLASSES = 4, 10  # side of a patch in pixels


class VisionTraining(Training):
    """Training of a vision encoder on one image per micro-batch: vision encoders have a batch dimension of 1."""

    def _unwrapped_chunk(self, virtual_stage: int | None) -> torch.nn.Module:
        return classifier(self.config, _side(self.case), self.case.transformer_engine)

    def _batches(self, step: int) -> Iterator[Any]:
        from megatron.core import parallel_state

        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(step)
        count = self.case.microbatches_of(step)
        side = _side(self.case)
        images = torch.randn(ranks, count, 1, 3, side, side, generator=generator)[rank]
        labels = torch.randint(0, CLASSES, (ranks, count, 1), generator=generator)[rank]
        for image, label in zip(images.to(self.case.torch_dtype), labels, strict=True):
            yield SimpleNamespace(images=image.cuda(), labels=label.cuda())

    def _losses(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(batch.images, batch.labels)

    def make_helper(self) -> Any:
        self.helper = self._vision_helper()
        return self.helper

    def _vision_helper(self) -> Any:
        from megatron.core.transformer.cuda_graphs import VisionTECudaGraphHelper, get_vision_cuda_graph_seq_length

        length = get_vision_cuda_graph_seq_length(SimpleNamespace(num_position_embeddings=self._encoder.seq_length))
        return VisionTECudaGraphHelper(self.chunks, self.config, length, self.case.micro_batch)

    @property
    def _encoder(self) -> Any:
        from megatron.core.utils import get_attr_wrapped_model

        return get_attr_wrapped_model(self.chunks[0], "vision_model")

    @property
    def layers(self) -> list[torch.nn.Module]:
        """Captured layers."""
        return list(self._encoder.decoder.layers)


class CaptionTraining(VisionTraining):
    """Training of a GPT with a vision encoder on one image and one text per micro-batch."""

    def _unwrapped_chunk(self, virtual_stage: int | None) -> torch.nn.Module:
        return captioner(self.config, self.case)

    def _batches(self, step: int) -> Iterator[Any]:
        for batch, text in zip(super()._batches(step), Training._batches(self, step), strict=True):
            yield SimpleNamespace(images=batch.images, text=text)

    def _losses(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        text = batch.text
        return model(batch.images, text.tokens, text.positions, text.mask, text.labels)

    def make_helper(self) -> Any:
        vision = self._vision_helper()
        self.helper = _BothHelpers(vision, Training.make_helper(self))
        return self.helper

    @property
    def layers(self) -> list[torch.nn.Module]:
        """Captured layers, starting with the vision encoder's."""
        return super().layers + super(VisionTraining, self).layers


class _BothHelpers:
    """Combines the helpers of a vision encoder and a language model.

    Attributes:
        vision, language: The helpers.
    """

    def __init__(self, vision: Any, language: Any):
        self.vision, self.language = vision, language

    def create_cudagraphs(self) -> None:
        self.vision.create_cudagraphs()
        self.language.create_cudagraphs()

    def before_step(self) -> bool:
        return all([self.vision.before_step(), self.language.before_step()])

    def graphs_created(self) -> bool:
        return self.vision.graphs_created() and self.language.graphs_created()

    def delete_cuda_graphs(self) -> None:
        self.vision.delete_cuda_graphs()
        self.language.delete_cuda_graphs()


def _side(case: Case) -> int:
    """Return the side in pixels of square images with at most ``case.sequence`` patches."""
    return PATCH * math.isqrt(case.sequence)


def classifier(config: Any, side: int, transformer_engine: bool = False) -> torch.nn.Module:
    """Return a ``vision_model`` with a linear classifier, which computes the loss on square images."""
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class Classifier(MegatronModule):
        def __init__(self):
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.vision_model = _encoder(config, side, transformer_engine)
            self.head = torch.nn.Linear(config.hidden_size, CLASSES)

        def set_input_tensor(self, input_tensor):
            """Ignore the input tensor: there is only one pipeline stage."""

        def forward(self, images, labels):
            tokens = self.vision_model(images)
            return torch.nn.functional.cross_entropy(self.head(tokens.mean(1)).float(), labels, reduction="none")

    return Classifier()


def captioner(config: Any, case: Case) -> torch.nn.Module:
    """Return a GPT that adds the features of a ``vision_model`` to its embeddings."""
    from megatron.core.models.gpt import GPTModel

    class Captioner(GPTModel):
        def __init__(self):
            super().__init__(
                config,
                gpt_layer_spec(case),
                VOCABULARY,
                case.sequence,
                position_embedding_type=case.positions,
                share_embeddings_and_output_weights=case.tied,
            )
            encoder = {"vision_model": _encoder(config, _side(case), case.transformer_engine)}
            # Megatron-FSDP prefetches in the order of registration, which must match execution.
            self.__dict__["_modules"] = encoder | self.__dict__["_modules"]

        def forward(self, images, tokens, positions, mask, labels):
            features = self.vision_model(images).mean(1)
            embedded = self.embedding(tokens, positions) + features.to(config.params_dtype)
            return super().forward(tokens, positions, mask, decoder_input=embedded, labels=labels)

    return Captioner()


def _encoder(config: Any, side: int, transformer_engine: bool) -> torch.nn.Module:
    from megatron.core.models.vision import vit_layer_specs
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel

    if transformer_engine:
        spec = vit_layer_specs.get_vit_layer_with_transformer_engine_spec()
    else:
        spec = vit_layer_specs.get_vit_layer_with_local_spec()
    return CLIPViTModel(
        config,
        spec,
        patch_dim=PATCH,
        img_h=side,
        img_w=side,
        # With an odd number of tokens, TransformerEngine's attention selects a different kernel under capture.
        add_class_token=False,
        model_subtype="internvit",  # other subtypes use norms that require Apex or TransformerEngine
    )
