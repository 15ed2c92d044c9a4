"""Encoders, decoders and bridges that do not fit are refused where the model is defined, by name."""

import pytest
from torch import nn

import cellrt
from cellrt import cells, unfolders
from cellrt.errors import DefinitionError
from tests.unfolders.translator import END, MOST, SIZE, START, TOKENS, WIDTH, Translator


def parts(kind=nn.LSTM, attends=False, **changes):
    made = Translator(kind, num_layers=1, is_both=False, attends=attends)
    decoder = made.decoder_module()
    given = {
        "encoder": made.layers(),
        "decoder": cellrt.cell(decoder, decoder.input_specs()),
        "keys": made.keys(decoder),
    }
    return {**given, "start": START, "max_steps": MOST} | changes


def layers_of(kind=nn.LSTM, size=SIZE, **options):
    return unfolders.from_torch(kind(WIDTH, size, **options), embedding=nn.Embedding(TOKENS, WIDTH))


def gru_cell():
    module = cells.EmbeddingGRUDecoder(TOKENS, WIDTH, SIZE, END)
    return cellrt.cell(module, module.input_specs())


def keys_of(read, made):
    return cellrt.cell(nn.Linear(read, made), {"input": (read,)})


def without(changes, *names):
    return {key: value for key, value in changes.items() if key not in names}


WRONG = {
    "a larger encoder": (
        lambda: parts(encoder=layers_of(size=7)),
        r"h_l0: float32\[7\].*'EmbeddingLSTMDecoder' starts",
    ),
    "both directions": (
        lambda: parts(encoder=layers_of(bidirectional=True)),
        r"together float32\[16\].*h: float32\[8\]",
    ),
    "two layers": (
        lambda: parts(encoder=layers_of(num_layers=2)),
        r"together float32\[2, 8\].*h: float32\[8\].*bridge=",
    ),
    "an LSTM before a GRU": (
        lambda: parts(decoder=gru_cell()),
        r"states are \['h', 'c'\].*Decoder' are \['h'\].*bridge=",
    ),
    "a GRU before an LSTM": (
        lambda: parts(encoder=layers_of(nn.GRU)),
        r"states are \['h'\].*are \['h', 'c'\].*bridge=",
    ),
    "another dtype": (
        lambda: parts(encoder=unfolders.from_torch(nn.LSTM(WIDTH, SIZE).bfloat16())),
        r"h_l0: bfloat16\[8\].*h: float32\[8\]",
    ),
    "no layers": (
        lambda: parts(encoder=nn.Linear(2, 3)),
        "the encoder cannot be used: from_torch: expected .* not Lin",
    ),
    "an unfolder": (lambda: parts(encoder=None), "the encoder cannot be used: from_torch: expected .* not NoneType"),
    "a decoder's module": (
        lambda: parts(decoder=cells.EmbeddingGRUDecoder(TOKENS, WIDTH, SIZE, END)),
        "expected a cell as decoder, .* got EmbeddingGRUDecoder",
    ),
    "a stack as decoder": (lambda: parts(decoder=layers_of()), "expected a cell as decoder, .* got Stack"),
    "a bridge of a state that is not there": (
        lambda: parts(bridge=cells.Bridge({"h": ["h_l1"]})),
        r"the bridge reads \['h_l1'\]; the encoder's last states are h_l0: float32\[8\], c_l0: float32\[8\]",
    ),
    "a bridge to a state that is not there": (
        lambda: parts(bridge=cells.Bridge({"s": ["h_l0"]})),
        r"the bridge makes s: float32\[8\]; the decoder 'EmbeddingLSTMDecoder' reads h: float32\[8\], c: float32\[8\]",
    ),
    "a bridge of another size": (
        lambda: parts(bridge=cells.Bridge({"h": ["h_l0"]}, {"h": nn.Linear(SIZE, 5)})),
        r"the bridge makes h: float32\[5\]; the decoder 'EmbeddingLSTMDecoder' reads h: float32\[8\]",
    ),
    "a bridge whose layer does not fit": (
        lambda: parts(bridge=cells.Bridge({"h": ["h_l0"]}, {"h": nn.Linear(5, SIZE)})),
        r" bridge' does not run on .* rows of \(h_l0: float32\[8\]\)",
    ),
    "a bridge that is a cell of another size": (
        lambda: parts(bridge=cellrt.cell(lambda h_l0: {"h": h_l0}, {"h_l0": (5,)})),
        r"the bridge reads h_l0: float32\[5\]; the encoder's last states are h_l0: float32\[8\]",
    ),
    "a module as bridge": (lambda: parts(bridge=nn.Linear(8, 8)), "expected a Bridge or a cell as bridge, got Linear"),
    "nothing of the encoder": (lambda: parts(bridge=cells.Bridge({})), "reads nothing of the encoder"),
    "an unknown result": (lambda: parts(results=("logprob",)), r"\['logprob'\] are not outputs.*return_logprobs=True"),
    "no steps": (lambda: parts(max_steps=0), "expected max_steps as an int of at least 1, got 0"),
    "another memory": (lambda: parts(attends=True, memory="x"), "no output 'x' to attend to"),
    "a wider memory": (
        lambda: parts(attends=True, encoder=layers_of(size=4, bidirectional=True, num_layers=1), keys=None),
        r"ragged inputs are \['memory', 'keys'\], but there are \['memory'\]",
    ),
    "rows of another size": (
        lambda: parts(attends=True, encoder=layers_of(size=7), bridge=cells.Bridge({})),
        r"attends to memory: ragged float32\[8\]; the encoder gives rows of float32\[7\]",
    ),
    "keys of another size": (
        lambda: parts(attends=True, keys=keys_of(SIZE, 5)),
        r"attends to keys: ragged float32\[6\]; the encoder gives rows of float32\[5\]",
    ),
    "keys of other rows": (
        lambda: parts(attends=True, keys=keys_of(5, 6)),
        r"the keys' 'input' is float32\[5\]; the encoder's rows are float32\[8\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_do_not_fit_are_refused_by_name(case):
    make, message = WRONG[case]
    with pytest.raises(DefinitionError, match=f"(?s)model.*{message}"):
        unfolders.encoder_decoder("model", **make())


def test_a_prompt_in_both_directions_is_not_continued():
    with pytest.raises(DefinitionError, match="'model': a prompt whose layers run in both directions .* give start="):
        unfolders.generate("model", gru_cell(), prompt=layers_of(nn.GRU, bidirectional=True), max_steps=MOST)
    with pytest.raises(
        DefinitionError, match="'model': a bridge leads from a prompt's layers, but there is no prompt="
    ):
        unfolders.generate("model", gru_cell(), bridge=cells.Bridge({}), max_steps=MOST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": gru_cell()}, "expected the decoder's module, got the cell 'EmbeddingGRUDecoder' of it"),
        ({"end": 3}, "the decoder ends at token 2, the search at 3"),
        ({"decoder": nn.Linear(2, 3)}, r"Linear has no input_specs\(\): expected inputs="),
        ({"encoder": layers_of(size=7)}, r"h_l0: float32\[7\].*'EmbeddingLSTMDecoder' starts with h: float32\[8\]"),
    ],
    ids=["a cell", "another end", "no input specs", "an encoder of another size"],
)
def test_a_search_that_does_not_fit_is_refused(changes, message):
    given = without(parts(), "keys") | {"decoder": cells.EmbeddingLSTMDecoder(TOKENS, WIDTH, SIZE, END), "end": END}
    with pytest.raises(DefinitionError, match=f"(?s)model.*{message}"):
        unfolders.beam_search("model", **given | changes)


@pytest.mark.parametrize("request_", [[1, 2], {"text": [1]}, {"source": [1], "max_step": 3}], ids=str)
def test_a_request_of_another_form_is_refused(request_):
    with pytest.raises(cellrt.RequestError, match="'model': expected a dict with 'source'"):
        unfolders.encoder_decoder("model", **parts()).record(None, request_)
