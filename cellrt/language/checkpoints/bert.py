"""BERT, MiniLM and others of their form: encoders whose rows become an embedding of the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from cellrt import Cell, DefinitionError
from cellrt.cells.bert_weights import LAYER_NAMES
from cellrt.cells.transformer_stack import Pooling, StackSizes, TransformerStack, sentence_encoder
from cellrt.language.checkpoints.config import MOST_TOKENS, Config, read_json, read_list
from cellrt.language.checkpoints.found import Found
from cellrt.language.checkpoints.weights import Plan, Weights
from cellrt.unfolders import embed

TYPES = "embeddings.token_type_embeddings.weight"
NAMES = {"embedding": "word_embeddings", "positions": "position_embeddings", "norm": "LayerNorm"}
NOT_WEIGHTS = r"embeddings\.position_ids", r"pooler\..*", r"cls\..*"
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


def bert(config: Config, weights: Weights, folder: Path) -> Found:
    """Return the description of a ``BertModel``, or of one within another model. All tokens are of its first type."""
    config.expect("hidden_act", "gelu")
    config.expect("position_embedding_type", "absolute")
    for name in ("is_decoder", "add_cross_attention"):
        config.expect(name, False)
    sizes = StackSizes(
        vocabulary=config.count("vocab_size", most=MOST_TOKENS),
        positions=config.count("max_position_embeddings", most=MOST_TOKENS),
        hidden=config.count("hidden_size"),
        inner=config.count("intermediate_size"),
        layers=config.count("num_hidden_layers", most=len(weights)),
        heads=config.count("num_attention_heads", most=1 << 14),
        epsilon=config.number("layer_norm_eps", 1e-12),
        norms_first=True,
    )
    own = weights.renamed(_in_new_form)
    own.expect(TYPES, (config.count("type_vocab_size", 2), sizes.hidden))
    plan = Plan(lambda: TransformerStack(sizes), _their_name, own)
    own.refuse_others(*NOT_WEIGHTS)

    def add_type(module: nn.Module) -> None:
        places = module.get_parameter("positions.weight")
        assert isinstance(module, TransformerStack)
        module.positions.weight = nn.Parameter(places.detach() + own.read(TYPES, places.dtype)[0])

    pooling, is_normed, most = _sentences_of(folder)
    context = min(sizes.positions, most)

    def cells(
        module: TransformerStack, end_token: int, *, name: str, max_batch: int = 64, max_batch_rows: int = 1024
    ) -> Cell:
        most = {"max_batch": max_batch, "max_batch_rows": max(max_batch_rows, context)}
        return sentence_encoder(module, name=name, pooling=pooling, is_normed=is_normed, **most)

    return Found("encoder", sizes.vocabulary, context, plan, cells, embed, add_type)


def _in_new_form(name: str) -> str:
    name = name.removeprefix("bert.")
    return next((name.removesuffix(old) + new for old, new in OLD_NAMES.items() if name.endswith(old)), name)


def _their_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if not part.startswith("layers."):
        return f"embeddings.{NAMES[part]}.{kind}"
    _, number, part = part.split(".", 2)
    return f"encoder.layer.{number}.{LAYER_NAMES[part]}.{kind}"


def _sentences_of(folder: Path) -> tuple[Pooling, bool, int]:
    """Return how a text's rows become one embedding, whether its length is 1, and the most tokens of a text.

    Files of ``sentence-transformers`` have them; without these files it is the mean, of length 1.
    """
    listed = folder / "modules.json"
    if not listed.exists():
        return "mean", True, MOST_TOKENS
    kinds = _modules_of(listed)
    pooling: Pooling = "mean"
    if "Pooling" in kinds:
        path = folder / kinds["Pooling"] / "config.json"
        own = Config(str(path), read_json(path))
        modes = [key for key, value in own.values.items() if key.startswith("pooling_mode_") and value is True]
        if modes not in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
            raise DefinitionError(f"{path}: expected pooling_mode_mean_tokens or pooling_mode_cls_token, got {modes}")
        pooling = "mean" if modes[0] == "pooling_mode_mean_tokens" else "first"
    path, most = folder / "sentence_bert_config.json", MOST_TOKENS
    if path.exists():
        most = Config(str(path), read_json(path)).count("max_seq_length", MOST_TOKENS, least=2, most=MOST_TOKENS)
    return pooling, "Normalize" in kinds, most


def _modules_of(listed: Path) -> dict[str, str]:
    """Return the folders of modules.json by the last part of the modules' types.

    Raise DefinitionError for modules other than a transformer, a pooling and a norm, and for folders that are not
    within.
    """
    found: dict[str, str] = {}
    modules: Sequence[object] = read_list(listed)
    for each in modules:
        if not isinstance(each, dict):
            raise DefinitionError(f"{listed}: expected a list of objects, got {each!r:.80}")
        own = Config(str(listed), each)
        kind, path = own.text("type").rpartition(".")[2], own.text("path", "")
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise DefinitionError(
                f"{listed}: expected Transformer, Pooling and Normalize, got {own.text('type')!r:.80}"
            )
        if path and (Path(path).name != path or path == ".."):
            raise DefinitionError(f"{listed}: expected a folder within its own, got {path!r:.80}")
        found[kind] = path
    return found
