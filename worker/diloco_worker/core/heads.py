"""Which parameters are merged by plain mean unless the user says otherwise: embeddings, and the output head.

Every other parameter is merged by the rule of the run. What is wrongly taken for a head loses that rule, so a module is
one only on good evidence: the model says so, its weight is tied to an embedding, or its size leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from diloco_worker.core import names


def embeddings_and_heads(model: nn.Module) -> set[int]:
    """Ids (as of `id`) of the weights and biases of embeddings and output heads."""
    modules = list({id(module): module for _, module in names.modules(model)}.values())
    embeddings: list[nn.Module] = [m for m in modules if isinstance(m, nn.Embedding)]
    embeddings += filter(_is_table, _answers(modules, "get_input_embeddings"))
    heads = [*_answers(modules, "get_output_embeddings"), *_tied(modules, embeddings)] or _by_size(modules)
    return {id(parameter) for module in [*embeddings, *heads] for parameter in _weight_and_bias(module)}


def _answers(modules: Sequence[nn.Module], question: str) -> Iterator[nn.Module]:
    """What models say of themselves, as those of Hugging Face do."""
    for module in modules:
        ask = getattr(module, question, None)
        if not callable(ask):
            continue
        try:
            answer = ask()
        except (NotImplementedError, AttributeError):  # a model that has the method, but no such layer
            continue
        if isinstance(answer, nn.Module):
            yield from answer if isinstance(answer, nn.ModuleList) else (answer,)


def _is_table(module: nn.Module) -> bool:
    """Whether it is an embedding of the user's own kind, and not the projection of image patches, for example."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Linear)


def _tied(modules: Sequence[nn.Module], embeddings: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules with the weight of an embedding. A bias of theirs is that of a head."""
    weights = {id(embedding._parameters.get("weight")) for embedding in embeddings} - {id(None)}
    for module in modules:
        if not isinstance(module, nn.Embedding) and id(module._parameters.get("weight")) in weights:
            yield module


def _by_size(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The only linear layer with as many outputs as the largest vocabulary has words.

    The largest: smaller embeddings are of positions, types and the like. A hidden size may be equal to theirs. None,
    if a linear layer reads that many features: then it is a hidden size as well.
    """
    vocabulary = max((m.num_embeddings for m in modules if isinstance(m, nn.Embedding)), default=0)
    layers = [m for m in modules if isinstance(m, nn.Linear)]
    fitting = [m for m in layers if m.out_features == vocabulary]
    if len(fitting) == 1 and all(m.in_features != vocabulary for m in layers):
        yield fitting[0]


def _weight_and_bias(module: nn.Module) -> Iterator[nn.Parameter]:
    for leaf in ("weight", "bias"):
        parameter = getattr(module, leaf, None)
        if isinstance(parameter, nn.Parameter):
            yield parameter
