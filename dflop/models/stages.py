"""Pipeline stages: a Hugging Face model without the parts that other stages own.

A stage keeps the parameter names of the whole model, so that checkpoints of any layout are unions of the stages'
state dicts and the final weights are an ordinary Hugging Face checkpoint. `LlmStage` runs any language model of
Llama's layout; a family's encoders are subclasses of `EncoderStage`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dflop.models.adapter_files import is_adapter
from dflop.models.division import EMBEDDING, HEAD, Division, llm_division
from dflop.models.kept_attention import keeping_attention
from dflop.models.loss_head import LossHead
from dflop.models.microbatch import EncoderBatch, TextBatch
from dflop.models.offloading import offload_layers
from dflop.models.shared_samples import place_features
from dflop.models.tensor_group import ALONE, Shard, TensorGroup
from dflop.models.token_parts import all_tokens, own_tokens

__all__ = ["EncoderStage", "LlmStage", "Stage", "cut_llm", "keep_layers"]


class Stage(nn.Module, ABC):
    """What all stages share: `hf`, the partial Hugging Face model, and `layers`, the module's layers that it has."""

    # The module that it is of.
    module: str
    # A pattern for the names of layers in `hf`.
    layer_name = r"\blayers?\.\d+"
    # Names in `hf` of parameters that no pass reads. They are never trained, because weight decay would shrink them.
    unread: tuple[str, ...] = ()

    def __init__(self, hf: PreTrainedModel, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.hf, self.layers, self.is_first, self.is_last = hf, layers, is_first, is_last
        # The tensor-parallel ranks, and for each parameter that they divide, by its name in `hf`: which part of it this
        # rank has.
        self.ranks: TensorGroup = ALONE
        self.shards: dict[str, Shard] = {}
        self._offloading: list[RemovableHandle] = []

    @property
    def reads_records(self) -> bool:
        """Whether the stage needs its microbatch's samples and not only hidden states. The first needs media or text,
        the last the media's layout or the targets; a stage between them may need to know where media lie."""
        return self.is_first or self.is_last

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    @property
    def layer_names(self) -> list[str]:
        """Names in `hf` of the layers."""
        layers = ((name, own) for name, own in self.hf.named_modules() if re.search(f"{self.layer_name}$", name))
        return [name for name, own in layers if next(own.parameters(), None) is not None]

    @property
    def units(self) -> list[str]:
        """Names in `hf` of the submodules that are gathered one at a time if replicas shard parameters: each layer, and
        an LLM's embedding and head, if they are not tied. All other parameters are gathered with the whole stage."""
        return self.layer_names

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the stage is trained, except for parameters that no pass reads."""
        return self.train_those(lambda name: requires_grad)

    def train_those(self, are_wanted: Callable[[str], bool]) -> Self:
        """Have the parameters trained whose plain names are wanted, and adapters; never those that no pass reads."""
        trained = self.those(are_wanted)
        for parameter in self.hf.parameters():
            parameter.requires_grad_(parameter in trained)
        return self

    def those(self, are_wanted: Callable[[str], bool], within: str = "") -> set[nn.Parameter]:
        """The parameters that `train_those` trains, of the submodule `within` of `hf`."""
        named = self.hf.get_submodule(within).named_parameters(within)
        return {
            parameter
            for name, parameter in named
            if is_adapter(name) or (name not in self.unread and are_wanted(self.plain_name(name)))
        }

    @contextmanager
    def layers_passing(self) -> Iterator[None]:
        """A context in which no layer is trained, so that layers pass gradients on alone."""
        trained = {parameter for parameter in self.hf.parameters() if parameter.requires_grad}
        inside = {own for name, own in self.named_hf_parameters().items() if self.part_of(name) == "layer"}
        for parameter in trained & inside:
            parameter.requires_grad_(False)
        yield
        for parameter in trained & inside:
            parameter.requires_grad_(True)

    @abstractmethod
    def division(self) -> Division:
        """What tensor-parallel ranks divide of the stage.

        Raises:
            UserError: when it is not known how to divide layers of this kind.
        """

    def plain_name(self, name: str) -> str:
        """The name of a parameter in `hf` by which a config speaks of it (`plan.trained`)."""
        root, part = "llm" if self.module == "llm" else f"{self.module}.encoder", self.part_of(name)
        if part == "layer":
            found = re.search(rf"{self.layer_name}\.", name)
            return f"{root}.layers.{found[0].split('.')[1]}.{name[found.end() :]}"
        if self.module == "llm":
            return f"llm.{'embeddings' if part == 'first' else 'head' if 'head' in name else 'norm'}.weight"
        own = name.removeprefix("model.").split(".")
        own = [piece for piece in own[1:] if piece not in ("embeddings", "merger")] or own
        return ".".join([f"{root}.embeddings" if part == "first" else f"{self.module}.projector", *own])

    def part_of(self, name: str) -> str:
        """Which part of the module a parameter belongs to, by its name in `hf`: `layer`, `first` or `last`."""
        if re.search(rf"{self.layer_name}\.", name):
            return "layer"
        return "first" if "embed" in name else "last"

    def partial_gradients(self) -> list[str]:
        """Names in `hf` of the parameters that every tensor-parallel rank has as a whole, but of whose gradients it
        computes a part: adapters that read the input of divided matrices."""
        ending = ".lora_A.weight"
        whole = [name for name in self.named_hf_parameters() if name.endswith(ending) and name not in self.shards]
        return [name for name in whole if f"{name.removesuffix(ending)}.weight" in self.shards]

    def set_offloaded(self, num_layers: int, num_still: int = 0) -> None:
        """Have `num_layers` layers behind the first `num_still`, which have no backward, and no others, keep their
        saved tensors in host memory (`offloading.py`)."""
        for handle in self._offloading:
            handle.remove()
        layers = [self.hf.get_submodule(name) for name in self.layer_names[num_still:]]
        self._offloading = offload_layers(layers, min(num_layers, len(layers)))

    def set_recomputed(self, num_layers: int, num_before: int = 0, num_attention_kept: int = 0) -> None:
        """Have `num_layers` layers behind the first `num_before`, and no others, keep only their inputs and recompute
        in backward. The last `num_attention_kept` of them keep attention's results, too."""
        # transformers 5.23 renamed both methods, and version 6 will remove the old names.
        if not num_layers:
            (getattr(self.hf, "activation_checkpointing_disable", None) or self.hf.gradient_checkpointing_disable)()
            return
        enable = getattr(self.hf, "activation_checkpointing_enable", None) or self.hf.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self.hf.disable_input_require_grads()  # else backward would go through all frozen layers, to embeddings
        names = self.layer_names
        end = min(num_before + num_layers, len(names))
        for name in names[:num_before] + names[end:]:
            self.hf.get_submodule(name).gradient_checkpointing = False
        for name in names[end - num_attention_kept : end]:
            layer = self.hf.get_submodule(name)
            layer._gradient_checkpointing_func = partial(
                layer._gradient_checkpointing_func, context_fn=keeping_attention
            )

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        return self.hf.state_dict()

    def named_hf_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.hf.named_parameters())


class EncoderStage(Stage):
    """Consecutive layers of an encoder, with what comes before the first layer and the projector after the last."""

    module = "vision"

    @abstractmethod
    def hidden_shape(self, num_items: int, layer: int) -> tuple[int, ...]:
        """The shape of what a stage with this first layer receives from the stage before: [num_items, num_positions,
        hidden_size] unless a family says otherwise."""

    @abstractmethod
    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """The first layer's input, [num_items, num_positions, hidden_size] unless a family says otherwise."""

    @abstractmethod
    def encode(self, hidden: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor | None]:
        """What `onward` and `finish` read: the input and the outputs of layers, or the last layer's output alone.

        The list is held until forward ends. So it has None in place of tensors that neither reads: a frozen encoder
        would hold all of them otherwise, and a trained one those that backward does not need.
        """

    def onward(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """What is sent to the next stage, from the result of `encode`."""
        return outputs[-1]

    @abstractmethod
    def finish(self, outputs: list[torch.Tensor], batch: EncoderBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, feature_size] (`ModelSpec.feature_size`)."""

    def forward(self, batch: EncoderBatch, hidden: torch.Tensor | None = None) -> torch.Tensor | list[torch.Tensor]:
        """From hidden states to hidden states. The first stage takes the batch's items instead, and the last returns
        each sample's features."""
        outputs = self.encode(self.embed(batch) if self.is_first else hidden, batch)
        return self.finish(outputs, batch) if self.is_last else self.onward(outputs)


class LlmStage(Stage):
    """Consecutive layers of the LLM, with the embedding if it is the first stage and the head and loss if it is the
    last.

    `kind` names the LLM whose layers it has (`division.py`); by default it is the `model_type` of its config. After
    each of the first `num_deepstack` layers further encoder features are added. Until then they are concatenated to the
    hidden states, along the hidden dimension, [1, num_tokens, hidden_size] each and zero for text tokens. So any layer
    can be a stage's first.
    """

    module = "llm"

    def __init__(
        self,
        hf: PreTrainedModel,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        kind: str | None = None,
        num_deepstack: int = 0,
    ) -> None:
        super().__init__(hf, layers, is_first=is_first, is_last=is_last)
        self.num_deepstack = num_deepstack
        self.kind = kind or hf.config.get_text_config().model_type

    @property
    def reads_records(self) -> bool:
        """With several position axes (mRoPE), every stage needs the media's places in the text for its positions."""
        return super().reads_records or self._has_axes

    @property
    def _has_axes(self) -> bool:
        return hasattr(self.hf.model.language_model.rotary_emb, "mrope_section")

    @property
    def units(self) -> list[str]:
        ends = () if self.hf.config.tie_word_embeddings else (EMBEDDING, HEAD)
        return super().units + [name for name in ends if self.hf.get_submodule(name) is not None]

    def division(self) -> Division:
        return llm_division(self.kind)

    def partial_gradients(self) -> list[str]:
        """As of any stage: all that is whole in the layers, as each rank has a part of the tokens."""
        names = self.named_hf_parameters() if self.ranks.size > 1 else ()
        return [name for name in names if self.part_of(name) == "layer" and name not in self.shards]

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights, without the last stage's copy of a tied embedding, which belongs to the first stage."""
        weights = super().hf_state_dict()
        if not self.is_first:
            weights.pop("model.language_model.embed_tokens.weight", None)
        return weights

    def hidden_shape(self, num_tokens: int, layer: int) -> tuple[int, ...]:
        """The shape of what a stage with this first layer receives from the stage before, or from `embed`."""
        num_carried = max(0, self.num_deepstack - layer)
        return (1, num_tokens, self.hf.config.get_text_config().hidden_size * (1 + num_carried))

    def embed(self, batch: TextBatch, features: list[torch.Tensor]) -> torch.Tensor:
        """Token embeddings [1, num_tokens, feature_size], with the encoders' `features` put in their positions.

        `features` are [num_features, feature_size], one for each replica of each encoder.
        """
        hidden = self.hf.model.language_model.embed_tokens(batch.token_ids)
        if self.num_deepstack:
            hidden = pad(hidden, (0, self.num_deepstack * hidden.shape[-1]))
        if batch.shared_features is not None:
            return place_features(hidden, features, batch.shared_features).unsqueeze(0)
        for positions, values in zip(batch.feature_positions, features, strict=True):
            if len(positions):
                hidden = hidden.index_copy(0, positions, values.to(hidden.dtype))
        return hidden.unsqueeze(0)

    def encode(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """The hidden states after this stage's layers, [1, num_tokens, hidden_size], concatenated with the DeepStack
        features that are still to be added."""
        language_model, ranks = self.hf.model.language_model, self.ranks if self.layers else ALONE
        hidden, *further = hidden.split(self.hf.config.get_text_config().hidden_size, dim=-1)
        positions = batch.position_ids.unsqueeze(-2)
        if positions.dim() == 2 and self._has_axes:  # text alone has the same on each axis
            positions = positions.expand(3, -1, -1)
        rotary = language_model.rotary_emb(hidden, positions)
        num_tokens, hidden = hidden.shape[1], own_tokens(hidden, ranks)
        for index in self.layers:
            hidden = language_model.layers[index](
                hidden, attention_mask=None, position_embeddings=rotary, segment_ends=batch.segment_ends
            )
            if further:
                hidden = hidden + own_tokens(further.pop(0), ranks)
        hidden = all_tokens(hidden, num_tokens, ranks)
        return hidden if self.is_last or not further else torch.cat([hidden, *further], dim=-1)

    def finish(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """The summed loss over all target tokens."""
        at_targets = self.hf.model.language_model.norm(hidden[0, batch.target_positions])
        return self.hf.lm_head(at_targets, batch.target_ids)

    def forward(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """From hidden states to hidden states, or on the last stage to the summed loss."""
        hidden = self.encode(hidden, batch)
        return self.finish(hidden, batch) if self.is_last else hidden


def cut_llm(
    hf: PreTrainedModel,
    layers: range,
    *,
    of_encoders: Sequence[str],
    kind: str | None = None,
    num_deepstack: int = 0,
) -> LlmStage:
    """The LLM's stage of these layers, cut in place from a whole model with `model.language_model` and `lm_head`.

    `of_encoders` names the submodules and parameters of `hf.model` that are not the LLM's. `kind` names the LLM whose
    layers it has, if its config's `model_type` is another name. `num_deepstack` layers of the whole LLM take further
    features. If the head is tied to the embedding, the last stage has a copy of it under the embedding's name.
    """
    language_model = hf.model.language_model
    for name in of_encoders:
        setattr(hf.model, name, None)
    is_first, is_last = keep_layers(language_model.layers, layers)
    if not (is_first or (is_last and hf.config.tie_word_embeddings)):
        language_model.embed_tokens = None
    if is_last:
        hf.lm_head = LossHead.of(hf.lm_head, hf.lm_head.out_features)
    else:
        language_model.norm, hf.lm_head = None, None
    return LlmStage(hf, layers, is_first=is_first, is_last=is_last, kind=kind, num_deepstack=num_deepstack)


def keep_layers(stack: nn.ModuleList, layers: range) -> tuple[bool, bool]:
    """Remove all other layers from a module's stack, in place. Returns whether the first and the last one are kept."""
    for index in set(range(len(stack))) - set(layers):
        stack[index] = nn.Identity()
    return layers.start == 0, layers.stop == len(stack)
