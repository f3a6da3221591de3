"""Mixture-of-experts models of transformers 5 whose experts do not fit in memory.

Examples:
    >>> from hoistway.experts.transformers import from_pretrained
    >>> model = from_pretrained("models/qwen3-30b-a3b", budget="8GiB")  # doctest: +SKIP
    >>> model.generate(**inputs)  # doctest: +SKIP
    >>> print(model.expert_store.stats()["hit_rate"])  # doctest: +SKIP

The experts' parameters stay on the meta device. The implementation ``"hoistway"`` of transformers'
``ExpertsInterface`` runs the code of the model itself, ``"eager"``, on the experts that a store leases: the results
are the same, bit by bit.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hoistway._arguments import path_text
from hoistway._checkpoint import Checkpoint
from hoistway._frameworks import device_name
from hoistway._options import ReaderOptions
from hoistway.errors import FormatError, HoistwayError, OptionError
from hoistway.experts._lease import LeasedExpert, Ticket
from hoistway.experts._store import Backing, ExpertStore
from hoistway.experts._trace import TraceWriter

IMPLEMENTATION = "hoistway"
"""The name of the implementation of experts in transformers."""

_PARTS = {
    "gate_up_proj": (("gate_up",), ("gate", "up")),
    "gate_proj": (("gate",),),
    "up_proj": (("up",),),
    "down_proj": (("down",),),
}
"""Parts of an expert that each parameter of transformers may consist of, one after the other."""

_FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of weights that no other tensor scales."""

_ALIGNMENT = 64
"""Bytes that memory of torch's is aligned to. Libraries may compute other sums on other memory."""


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    budget: int | str,
    model_class: type[Any] | None = None,
    device: Any = "cpu",
    policy: str = "ewma2",
    backing: Backing | None = None,
    profile: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
    reader: ReaderOptions | None = None,
    **options: Any,
) -> Any:
    """Loads a model without its experts, which come from storage as they are used.

    Args:
        path: The directory of the model: safetensors files and ``config.json``.
        budget: Bytes that experts in memory may take, a number or text such as ``"8GiB"``. The model's other weights
            are loaded besides.
        model_class: The class of the model. By default the one that ``config.json`` names.
        device: Where the model is, and its experts.
        policy: As in `ExpertStore.open`.
        backing: As in `ExpertStore.open`.
        profile: As in `ExpertStore.open`.
        timeout: As in `ExpertStore.open`.
        reader: Options of the store's reads.
        options: What ``from_pretrained`` of transformers takes besides, such as ``dtype``.

    Returns:
        The model, whose attribute ``expert_store`` is its `ExpertStore`.

    Raises:
        OptionError: The experts of this model cannot be streamed; the message says why.
    """
    directory = path_text(path)
    if not os.path.isdir(directory):
        raise OptionError(f"path cannot be {directory!r}: it is not a directory; download the model first")
    config = transformers.AutoConfig.from_pretrained(directory)
    if getattr(config, "quantization_config", None) is not None:
        raise OptionError(
            f"the experts of {directory} are quantised, which transformers' own loader has to convert"
        )
    model_class = model_class or _class_of(config)
    name = device_name(device, "torch")
    with Checkpoint(directory, device=name) as checkpoint:
        store = ExpertStore.open(
            checkpoint,
            budget=budget,
            policy=policy,
            backing=backing,
            device=name,
            top_k=_top_k(config),
            profile=profile,
            timeout=timeout,
            **(reader or {}),
        )
        is_dense = set(store.catalog.dense).__contains__
        dense = dict(checkpoint.load(select=is_dense))
    if name != "cpu":
        options["device_map"] = {"": device}
    model, info = _without_experts(model_class).from_pretrained(
        None,
        config=config,
        state_dict=dense,
        experts_implementation=IMPLEMENTATION,
        output_loading_info=True,
        **options,
    )
    del dense
    missing = sorted(info["missing_keys"])
    if missing:
        raise FormatError(
            f"{directory} has no weights for {', '.join(missing[:3])}{' …' * (len(missing) > 3)}",
            path=directory,
            tensor=missing[0],
        )
    model.__class__ = model_class
    _check_conversions(model)
    for number, module in expert_modules(model).items():
        module._hoistway = _Layer(store, number, module, torch.device(device))
    # A graph of gradients would keep the experts of all layers leased.
    model.requires_grad_(False)
    model.expert_store = store
    if model.can_generate() and os.path.exists(os.path.join(directory, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model


@contextmanager
def record(model: Any, path: str | os.PathLike[str], *, name: str | None = None) -> Iterator[None]:
    """Records what the routers of a model choose, as a trace for ``hoistway moe replay``: of all that the model
    computes within the context. The model may have its experts in memory or not.

    Args:
        model: A model of transformers.
        path: The trace, which is replaced: JSON lines.
        name: The name of the model in the trace. By default that of its configuration.

    Raises:
        OptionError: The model has no experts of transformers' ``ExpertsInterface``.
    """
    modules = expert_modules(model)
    layers = {number: (int(module.num_experts), _expert_bytes(module)) for number, module in modules.items()}
    top_k = _top_k(model.config)
    if top_k is None:
        raise OptionError(
            f"the configuration of {type(model).__name__} does not say how many experts a token uses"
        )
    name = name or getattr(model.config, "name_or_path", None) or None
    with TraceWriter(path, experts_per_token=top_k, layers=layers, model=name) as trace:
        recorder = _Recorder(trace)
        hooks = [model.register_forward_pre_hook(recorder.begin, with_kwargs=True)]
        for number, module in modules.items():
            hooks.append(module.register_forward_pre_hook(recorder.of_layer(number), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def expert_modules(model: Any) -> dict[int, Any]:
    """The modules of a model that hold experts, by the number of their layer.

    Raises:
        OptionError: There are none, or a layer has several.
    """
    modules: dict[int, Any] = {}
    for name, module in model.named_modules():
        if not _holds_experts(module):
            continue
        numbers = re.findall(r"(?:^|\.)(?:layers|layer|blocks|h)\.(\d+)(?=\.)", name)
        if not numbers or int(numbers[-1]) in modules:
            raise OptionError(f"module {name!r} holds experts, and no number of a layer that it alone has")
        modules[int(numbers[-1])] = module
    if not modules:
        raise OptionError(f"{type(model).__name__} has no experts of transformers' ExpertsInterface")
    return modules


def _holds_experts(module: Any) -> bool:
    return hasattr(module, "num_experts") and hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _class_of(config: Any) -> type[Any]:
    for name in getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    raise OptionError("config.json names no class of transformers: say with model_class which one it is")


def _top_k(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
    ):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _without_experts(model_class: type[Any]) -> type[Any]:
    """A class whose models have no weights of experts: the loader neither looks for them nor makes any."""

    def init(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        model_class.__init__(self, config, *arguments, **options)
        for module in expert_modules(self).values():
            for name in _parameters(module):
                parameter = module._parameters.pop(name)
                # For initialisers, which do nothing to it.
                module.__dict__[name] = torch.empty_like(parameter, device="meta")

    names = {"__init__": init, "__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, (model_class,), names)


def _parameters(module: Any) -> list[str]:
    """The names of a module's parameters that stack experts, but for biases."""
    found = [name for name in _PARTS if module._parameters.get(name) is not None]
    others = [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 2 and name not in found
    ]
    if not found or others:
        raise OptionError(
            f"{type(module).__name__} keeps its experts in {', '.join([*found, *others])}, which cannot be streamed"
        )
    return found


def _expert_bytes(module: Any) -> int:
    stacked = (getattr(module, name, None) for name in _PARTS)
    weights = [weight for weight in stacked if isinstance(weight, torch.Tensor)]
    return sum(weight.numel() // int(module.num_experts) * weight.element_size() for weight in weights)


def _check_conversions(model: Any) -> None:
    """Fails if transformers would load the experts in another way than one after the other."""
    for conversion in get_model_conversion_mapping(model):
        operations = getattr(conversion, "operations", None)
        targets = [target for target in conversion.target_patterns if re.search(r"experts\b.*_proj", target)]
        if not operations or not targets or any("bias" in target for target in targets):
            continue
        steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
        sources = [source for source in conversion.source_patterns if re.search(r"gate_proj|w1\b", source)]
        is_stacked = steps[:1] == [("MergeModulelist", 0)]
        is_joined = steps[1:] == [("Concatenate", 1)] * (len(conversion.source_patterns) > 1)
        gate_first = not sources or sources[0] == conversion.source_patterns[0]
        if not (is_stacked and is_joined and gate_first):
            names = ", ".join(step for step, _ in steps)
            raise OptionError(
                f"transformers converts the experts of {type(model).__name__} as it loads them ({names}), so they "
                "cannot be streamed"
            )


class _Layer:
    """The experts of a layer, and where they come from."""

    def __init__(self, store: ExpertStore, number: int, module: Any, device: torch.device) -> None:
        self.store = store
        self.number = number
        self.device = device
        self._few = store.catalog.top_k or 1
        described = store.catalog.layers.get(number)
        if described is None or described.experts != module.num_experts:
            found = 0 if described is None else described.experts
            raise OptionError(f"layer {number} has {module.num_experts} experts, and the files have {found}")
        self._expert_bytes = described.expert_bytes
        parts = store.catalog.parts(number, 0)
        self._parts: dict[str, tuple[str, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in [name for name in _PARTS if isinstance(module.__dict__.get(name), torch.Tensor)]:
            weight = module.__dict__.pop(name)
            module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
            chosen = [names for names in _PARTS[name] if all(part in parts for part in names)]
            if not chosen:
                raise OptionError(f"the files have no experts for {name} of layer {number}")
            self._parts[name] = chosen[0]
            self._shapes[name] = tuple(weight.shape[1:])
            is_split = len(chosen[0]) > 1
            if is_split and (module.is_transposed or not module.is_concatenated):
                raise OptionError(
                    f"the files have gate and up of layer {number} apart, and {name} interleaves them"
                )
        used = [part for names in self._parts.values() for part in names]
        for part, (tensor, dtype, _, _) in parts.items():
            if part not in used or dtype not in _FLOATS:
                raise OptionError(
                    f"tensor {tensor!r} of type {dtype} has no place in {type(module).__name__}"
                )

    def weight(self, name: str, expert: LeasedExpert, dtype: torch.dtype) -> torch.Tensor:
        """What a parameter has of an expert, as transformers would have loaded it."""
        parts = [expert[part] for part in self._parts[name]]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tuple(weight.shape) != self._shapes[name]:
            raise FormatError(
                f"{name} of expert {expert.expert} of layer {self.number} has the shape {list(weight.shape)}, "
                f"and the model wants {list(self._shapes[name])}"
            )
        if weight.dtype != dtype:
            return weight.to(dtype)
        if weight.data_ptr() % _ALIGNMENT != 0:
            return weight.clone()
        return weight

    def observe(
        self, chosen: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], experts: int
    ) -> list[int]:
        """Tells the policy what was chosen, one token after the other, and returns the experts of all, in order."""
        pairs = (zip(*token, strict=True) for token in zip(chosen, weights, strict=True))
        # Numbers behind the last expert mean none.
        visit = [(expert, weight) for token in pairs for expert, weight in token if expert < experts]
        if visit:
            self.store.observe(self.number, visit)
        return sorted({expert for expert, _ in visit})

    def waves(self, experts: Sequence[int]) -> list[Sequence[int]]:
        """Experts as requests of which two are within half of the budget, or those of one token."""
        if len(experts) <= self._few:
            return [experts]
        budget = self.store.stats()["budget_bytes"]
        size = max(1, budget // 4 // max(1, self._expert_bytes))
        return [experts[start : start + size] for start in range(0, len(experts), size)]


class _Visit:
    """The experts of one call of a layer, read in waves: the next one while this one computes."""

    def __init__(self, layer: _Layer, experts: Sequence[int]) -> None:
        self._layer = layer
        self._waves = layer.waves(experts)
        self._wave_of = {expert: wave for wave, experts in enumerate(self._waves) for expert in experts}
        self._tickets: dict[int, Ticket] = {}
        self._wave = -1
        self._expert: LeasedExpert | None = None
        if experts:
            self._go_to(0)

    def weight(self, name: str, index: Any, dtype: torch.dtype) -> torch.Tensor:
        """What a parameter has of an expert."""
        if (isinstance(index, torch.Tensor) and index.numel() != 1) or isinstance(
            index, slice | tuple | list
        ):
            raise OptionError(
                f"the model looks at several experts of {name} at once, so they cannot be streamed"
            )
        expert = int(index)
        if self._expert is None or self._expert.expert != expert:
            wave = self._wave_of.get(expert)
            if wave is None:
                raise OptionError(f"the model uses expert {expert}, which its router did not choose")
            if wave != self._wave:
                self._go_to(wave)
            self._expert = self._tickets[wave].expert(expert)
        return self._layer.weight(name, self._expert, dtype)

    def close(self) -> None:
        """Gives all experts back."""
        self._release(list(self._tickets))

    def _go_to(self, wave: int) -> None:
        self._wave = wave
        self._release([other for other in self._tickets if other != wave])
        for wanted in range(wave, min(wave + 2, len(self._waves))):
            if wanted not in self._tickets:
                self._tickets[wanted] = self._layer.store.ensure_async(
                    self._layer.number, self._waves[wanted]
                )

    def _release(self, waves: Sequence[int]) -> None:
        self._expert = None
        if waves and self._layer.device.type != "cpu":
            # Kernels that were queued may not have read the experts yet.
            torch.cuda.current_stream(self._layer.device).synchronize()
        for wave in waves:
            self._tickets.pop(wave).release()


class _Weights:
    """Stands for a parameter that stacks experts: an index reads one of them."""

    def __init__(self, name: str, parameter: torch.Tensor, visit: _Visit) -> None:
        self._name = name
        self._visit = visit
        self.shape, self.dtype, self.ndim = parameter.shape, parameter.dtype, parameter.ndim

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._visit.weight(self._name, index, self.dtype)

    def size(self, dimension: int | None = None) -> Any:
        """Elements along a dimension, or along all."""
        return self.shape if dimension is None else self.shape[dimension]

    def __getattr__(self, attribute: str) -> Any:
        raise OptionError(
            f"the model asks for {attribute} of all experts of {self._name}, which are not in memory"
        )


class _StandIn:
    """Stands for a module of experts in its own code."""

    def __init__(self, module: Any, visit: _Visit) -> None:
        self._module = module
        for name in module._hoistway._parts:
            setattr(self, name, _Weights(name, module._parameters[name], visit))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _forward(module: Any, *arguments: Any, **options: Any) -> Any:
    """Runs a module's own code on experts that are leased."""
    layer: _Layer | None = getattr(module, "_hoistway", None)
    if layer is None:
        raise OptionError(
            "experts_implementation='hoistway' needs a model that hoistway.experts.transformers.from_pretrained loaded"
        )
    eager = inspect.unwrap(type(module).forward)
    _, chosen, weights = _routing(module, arguments, options)
    with torch.no_grad():
        tokens = chosen.reshape(-1, chosen.shape[-1])
        experts = layer.observe(
            tokens.tolist(), weights.reshape(tokens.shape).float().tolist(), int(module.num_experts)
        )
    visit = _Visit(layer, experts)
    try:
        return eager(_StandIn(module, visit), *arguments, **options)
    finally:
        visit.close()


def _routing(module: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Hidden states, chosen experts and their weights: the first three arguments of every module of experts."""
    bound = inspect.signature(inspect.unwrap(type(module).forward)).bind(module, *arguments, **options)
    _, hidden, chosen, weights = list(bound.arguments.values())[:4]
    if chosen.shape != weights.shape or chosen.is_floating_point():
        raise HoistwayError(
            f"{type(module).__name__} is called with other arguments than transformers' experts are"
        )
    return hidden, chosen, weights


class _Recorder:
    """Writes what routers choose to a trace."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._turn = -1
        self._phase: Any = None
        self._step = 0
        self._tokens = 0

    def begin(self, _model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A call of the model: a prompt, or the next token of each sequence."""
        given = options.get("input_ids")
        given = options.get("inputs_embeds") if given is None else given
        given = next(iter(arguments), None) if given is None else given
        is_prompt = given is None or given.shape[1] > 1
        if self._turn < 0 or (is_prompt and self._phase == "decode"):
            self._turn += 1
        self._phase = "prefill" if is_prompt else "decode"
        self._step += self._tokens
        self._tokens = 0

    def of_layer(self, number: int) -> Any:
        """A hook of a module of experts."""

        def hook(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            _, chosen, weights = _routing(module, arguments, options)
            tokens = chosen.reshape(-1, chosen.shape[-1])
            rows = zip(tokens.tolist(), weights.detach().reshape(tokens.shape).float().tolist(), strict=True)
            self._tokens = max(self._tokens, len(tokens))
            for token, (experts, own) in enumerate(rows):
                visit = [pair for pair in zip(experts, own, strict=True) if pair[0] < module.num_experts]
                self._trace.visit(
                    number,
                    [expert for expert, _ in visit],
                    [weight for _, weight in visit],
                    step=self._step + token,
                    phase=self._phase,
                    turn=max(self._turn, 0),
                )

        return hook


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
