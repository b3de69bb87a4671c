"""Which tensors of the user's model are shared with other learners: decided by name, once, when the model joins.

    shared     synchronized: pushed, merged, pulled
    private    trained here, never sent and not compared
    frozen     neither trained nor sent; equal in all learners (frozen_tensors.py)

buffers.py decides which buffers are shared; `private` ones are not.

Unless the user says otherwise, embeddings and the output head are merged by plain mean. A layer wrongly taken for a
head would lose the run's merge rule, so evidence must be good: the model says so, its weight is tied to an embedding,
or its size leaves no doubt.

Names are those of names.py; any name of a tied tensor stands for it. Other code asks here instead of reading
`requires_grad`, which may change while the learner trains if `shared` is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco_common.errors import UnsupportedModel, WrongCall, did_you_mean, shown
from diloco_common.wire.bounds import TENSOR_NAME_MAX
from diloco_worker.core import names
from diloco_worker.core.buffers import buffers_of

Models: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Patterns: TypeAlias = str | Collection[str]
"""Names, with `*`, `?` and `[...]` as in the shell; a single one may be a plain string."""


class SharedSet:
    """The parameters of one model by plain name, each once, sorted by name."""

    def __init__(self, model: Models, shared: Patterns | None = None, private: Patterns = ()) -> None:
        """`shared`: everything that will ever be trained together, or "all"; None: what requires a gradient now.
        Raises WrongCall for an invalid model or pattern, and UnsupportedModel for a model that cannot be shared."""
        self.model = as_module(model)
        self.is_named = shared is not None
        """Whether the user has named what is shared, so that it may be frozen and unfrozen at any time."""
        _refuse_scripted(self.model)
        by_name = names.parameters(self.model)
        if lazy := [name for name, parameter in by_name.items() if is_lazy(parameter)]:
            raise UnsupportedModel(
                f"{lazy[0]} has no shape yet, as the module is lazy: send one batch through the model before join"
            )
        self.name_of = names.canonical(by_name)
        """Every name -> the smallest name of its tensor."""
        self.objects: dict[str, list[nn.Parameter]] = {}
        """That name -> all Parameters that are this tensor: several, if modules share its memory."""
        for name, of in self.name_of.items():
            self.objects.setdefault(of, []).append(by_name[name])
        buffers = names.buffers(self.model)
        private_names = matching("private", private, [*by_name, *buffers])
        self.buffers = buffers_of(self.model, private_names & buffers.keys())
        named = self._named(shared, by_name)
        kept = {self.name_of[name] for name in private_names & by_name.keys()}
        self.shared: dict[str, nn.Parameter] = {}
        self.private: dict[str, nn.Parameter] = {}
        self.frozen: dict[str, nn.Parameter] = {}
        self.all = names.once(by_name)
        """The shared, private and frozen parameters together."""
        for name, parameter in self.all.items():
            (self.private if name in kept else self.shared if name in named else self.frozen)[name] = parameter
        self.ties = {name: of for name, of in self.name_of.items() if name != of and of in self.shared}
        """Every other name of a tied shared parameter or buffer -> its name in `shared`."""
        self.ties |= self.buffers.ties
        self._refuse_what_nobody_shares()

    def saved(self) -> list[tuple[str, str]]:
        """Where the model's state_dict differs from what is shared: (key, tensor's name); (key, "") if it is not
        shared, these first; ("", name) for a name that is no key."""
        shared: dict[str, Tensor] = {**self.shared, **{n: buffer.tensor for n, buffer in self.buffers.shared.items()}}
        of = {names.identity(tensor): name for name, tensor in shared.items()}
        keys = {
            key: of.get(names.identity(value) if isinstance(value, Tensor) else None, key if key in shared else "")
            for key, value in names.saved(self.model).items()
            if len(key) <= TENSOR_NAME_MAX
        }
        found = [(key, name) for key, name in keys.items() if key != name] if keys else [*self.ties.items()]
        return sorted(found, key=lambda pair: not pair[1]) + [
            ("", name) for name in shared if keys and name not in keys
        ]

    def _named(self, shared: Patterns | None, by_name: Mapping[str, nn.Parameter]) -> set[str]:
        if shared is None:
            return {self.name_of[name] for name, p in by_name.items() if p.requires_grad}
        found = by_name.keys() if shared == "all" else matching("shared", shared, by_name)
        # Integers are left out: a quantized base stays frozen.
        return {self.name_of[name] for name in found if by_name[name].is_floating_point() or by_name[name].is_complex()}

    def _refuse_what_nobody_shares(self) -> None:
        for name in self.frozen:
            if any(p.requires_grad for p in self.objects[name]):
                raise UnsupportedModel(
                    f"{name} requires a gradient, and is neither shared nor private: add it to shared= (or give "
                    'shared="all"), add it to private=, or freeze it before join (requires_grad_(False))'
                )


def as_module(model: object) -> nn.Module:
    """The joined modules as one: names in a list begin with "0.", "1.", ..., those in a dict with its keys.
    Raises WrongCall."""
    if isinstance(model, nn.Module):
        return model
    several = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else ()
    if not several or not all(isinstance(one, nn.Module) for one in several):
        raise WrongCall(f"the model is {shown(model)}: give the nn.Module, a list of modules or a dict of them")
    try:
        return nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else nn.ModuleList(several)
    except (KeyError, TypeError) as error:
        raise WrongCall(f"the dict of models: {error.args[0]}; give each a name such as actor") from None


def matching(argument: str, patterns: Patterns, known: Iterable[str]) -> set[str]:
    """The known names that match one of the patterns. Raises WrongCall for a pattern that matches none."""
    every = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(every, Collection) or isinstance(every, Mapping) or not all(isinstance(p, str) for p in every):
        raise WrongCall(f'{argument}= is {shown(patterns)}: give names of parameters, or patterns such as ["head.*"]')
    names_known = list(known)
    found: set[str] = set()
    for pattern in every:
        fits = [name for name in names_known if fnmatchcase(name, pattern)]
        if not fits:
            raise WrongCall(f"{argument}={pattern!r} fits nothing in the model{did_you_mean(pattern, names_known)}")
        found.update(fits)
    return found


def _refuse_scripted(model: nn.Module) -> None:
    """Raises UnsupportedModel for TorchScript, which does not expose its parameters in place."""
    for path, module in names.modules(model):
        if names.is_scripted(module):
            raise UnsupportedModel(
                f"{path or 'the model'} is of TorchScript: join the module that it was made of by torch.jit.script, "
                "whose parameters are the same, and train the script"
            )


def embeddings_and_heads(model: nn.Module) -> set[int]:
    """Ids (by `id`) of the weights and biases of embeddings and output heads."""
    modules = list({id(module): module for _, module in names.modules(model)}.values())
    embeddings: list[nn.Module] = [m for m in modules if isinstance(m, nn.Embedding)]
    embeddings += filter(_is_table, _answers(modules, "get_input_embeddings"))
    heads = [*_answers(modules, "get_output_embeddings"), *_tied(modules, embeddings)] or _by_size(modules)
    found = (getattr(module, leaf, None) for module in [*embeddings, *heads] for leaf in ("weight", "bias"))
    return {id(parameter) for parameter in found if isinstance(parameter, nn.Parameter)}


def _answers(modules: Sequence[nn.Module], question: str) -> Iterator[nn.Module]:
    """The answers of modules that have this method, as models of Hugging Face do."""
    for module in modules:
        ask = getattr(module, question, None)
        if not callable(ask):
            continue
        try:
            answer = ask()
        except (NotImplementedError, AttributeError):  # a model with the method, but without such a layer
            continue
        if isinstance(answer, nn.Module):
            yield from answer if isinstance(answer, nn.ModuleList) else (answer,)


def _is_table(module: nn.Module) -> bool:
    """Whether it is a custom embedding, and not a projection of image patches, for example."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Linear)


def _tied(modules: Sequence[nn.Module], embeddings: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Other modules with the weight of an embedding; their bias is that of a head."""
    weights = {id(embedding._parameters.get("weight")) for embedding in embeddings} - {id(None)}
    for module in modules:
        if not isinstance(module, nn.Embedding) and id(module._parameters.get("weight")) in weights:
            yield module


def _by_size(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The only linear layer with as many outputs as the largest vocabulary has words.

    Smaller embeddings are of positions, types and the like, and may equal a hidden size. Nothing if a linear layer also
    reads that many features: then this number is a hidden size as well.
    """
    vocabulary = max((m.num_embeddings for m in modules if isinstance(m, nn.Embedding)), default=0)
    layers = [m for m in modules if isinstance(m, nn.Linear)]
    fitting = [m for m in layers if m.out_features == vocabulary]
    if len(fitting) == 1 and all(m.in_features != vocabulary for m in layers):
        yield fitting[0]
