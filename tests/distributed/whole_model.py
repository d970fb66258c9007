"""The oracle of training: transformers' own model on one sample after the other, unpacked, in one process."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from dflop.config import Config
from dflop.loading.dataset import EncoderFeed, MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.models import ModelSpec, load_model_spec, load_runtime
from dflop.models.stages import is_adapter
from dflop.models.weights import norms_in_float64
from dflop.shapes import SampleShapes, ShapeReader, list_sources
from dflop.shapes.reader import MediumSize
from dflop.shapes.text import ChatTokenizer, tokenizer_folder

__all__ = ["build_whole_model", "loss_of_batch", "name_of", "optimizer_of", "reader_of"]


def reader_of(config) -> ShapeReader:
    return ShapeReader(load_model_spec(config.model).rules, config.data)


def build_whole_model(config: Config) -> PreTrainedModel:
    """The model in float64, with the weights that the stages draw."""
    spec, runtime = load_model_spec(config.model), load_runtime(config.model.family)
    tokenizer = ChatTokenizer(tokenizer_folder(config.model), spec.rules)
    hf_config = runtime.make_config(
        spec, tokenizer.placeholder_ids | tokenizer.special_ids, tokenizer.vocab_size(spec.media)
    )
    checkpoint = Path(config.model.path) if config.model.path else None
    weights = {}
    for module in spec.modules:
        layers = range(module.num_layers)
        how = {"seed": config.seed, "checkpoint": checkpoint, "trained": config.model.trained}
        stage = runtime.build_stage(hf_config, module.name, layers=layers, **how)
        weights |= stage.hf_state_dict()
    for part in hf_config.sub_configs:
        getattr(hf_config, part)._attn_implementation = "sdpa"
    model = runtime.architecture(hf_config)
    adapters = {name: weights.pop(name) for name in list(weights) if is_adapter(name)}
    model.load_state_dict(weights)
    norms_in_float64(model)
    if adapters:
        _adapt(model, config, adapters)
    return model.double().train()


def _adapt(model: PreTrainedModel, config: Config, adapters: Mapping[str, torch.Tensor]) -> None:
    """Put peft's own adapters into the model, with these values, but for `lora_B` random ones instead of zeros: with
    zeros the gradients of `lora_A` would be zeros."""
    import peft  # which only variants with adapters need

    own, torch_random = config.model.lora, torch.Generator().manual_seed(7)
    linear = sorted({name.rpartition(".lora_")[0] for name in adapters})
    peft_config = peft.LoraConfig(
        r=own.rank, lora_alpha=own.alpha, use_rslora=own.rslora, lora_dropout=own.dropout, target_modules=linear
    )
    peft.inject_adapter_in_model(peft_config, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name_of(name) in adapters:
                values = adapters[name_of(name)]
                if ".lora_B." in name:
                    values = 0.1 * torch.randn(values.shape, generator=torch_random)
                parameter.copy_(values)


def name_of(parameter: str) -> str:
    """Our name of a parameter of a model with peft's adapters."""
    return parameter.replace(".base_layer.", ".").replace(".default.", ".")


def optimizer_of(
    model: torch.nn.Module, lr: float, own_rates: Mapping[str, tuple[float, float]] = MappingProxyType({})
) -> torch.optim.AdamW:
    """AdamW over what requires gradients; vectors do not decay. `own_rates` has, by name, learning rates and weight
    decays that are not those of all others."""
    named = dict(model.named_parameters())
    trained = [own for name, own in named.items() if own.requires_grad and name not in own_rates]
    matrices, vectors = [own for own in trained if own.ndim > 1], [own for own in trained if own.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    groups += [{"params": [named[name]], "lr": own, "weight_decay": decay} for name, (own, decay) in own_rates.items()]
    return torch.optim.AdamW(groups, lr=lr)


def loss_of_batch(model: PreTrainedModel, config: Config, batch: SampleShapes) -> float:
    """The mean loss over a global batch's target tokens; its gradients are added to the model's."""
    spec = load_model_spec(config.model)
    media, text = _loaders(config, spec)
    num_targets, loss = int(batch.target_tokens.sum()), 0.0
    for index in range(len(batch)):
        part = _loss_of_sample(model, media, text, batch, index) / num_targets
        if part.requires_grad:  # not that of a text, where the LLM is frozen
            part.backward()
        loss += part.item()
    return loss


def _loaders(config: Config, spec: ModelSpec) -> tuple[dict[str, MicrobatchLoader], MicrobatchLoader]:
    """Of each encoder, and of the LLM."""
    common = {
        "records": TrainingRecords(list_sources(config.data), config.seed),
        "reader": reader_of(config),
        "tokenizer_folder": tokenizer_folder(config.model),
        "max_llm_tokens": config.data.max_llm_tokens,
        "encoders": tuple(EncoderFeed(encoder.media, 1) for encoder in spec.encoders),
    }
    processors = load_runtime(spec.family).processors
    media = {
        encoder.name: MicrobatchLoader(**common, encoder=place, processor=processors[encoder.name](spec, None))
        for place, encoder in enumerate(spec.encoders)
    }
    return media, MicrobatchLoader(**common, encoder=None)


def _loss_of_sample(model, loaders, text, batch: SampleShapes, index: int) -> torch.Tensor:
    """Summed loss of one sample through the whole model's own `forward`, never packed."""
    job = MicrobatchJob(
        samples=(SampleRef(str(batch.source[index]), int(batch.row[index])),),
        media=tuple(tuple(MediumSize(*size) for size in sizes) for sizes in batch.media[[index]].of_each()),
        kept_tokens=(tuple(batch.kept_tokens[index].tolist()),),
        llm_tokens=(int(batch.llm_tokens[index]),),
        encoder_rank=((0,) * len(batch.encoders),),
    )
    packed = text[job]
    media = {
        encoder: loaders[encoder][job].batch.to(torch.device("cpu"), torch.float64)
        for encoder, num_items in zip(batch.encoders, batch.num_items[index], strict=True)
        if num_items
    }
    inputs = load_runtime(model.config.model_type).plain_inputs(media, packed)
    logits = model(input_ids=packed.token_ids[None], **inputs).logits[0, packed.target_positions]
    return torch.nn.functional.cross_entropy(logits, packed.target_ids, reduction="sum")
