"""What a benchmark is told: which trees, how many live nodes; and what the command says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import chain
from benchmarks.__main__ import FOLDER, benchmark_names, main
from benchmarks.options import TREEBANK_VARIABLE, are_there, find_treebank
from benchmarks.overhead import GROWTH_BATCHES, LENGTH, LIVE_NODES, growth_requests
from benchmarks.trees import treebank_trees
from examples.models.treebank import ADDRESS, TRAIN

REPOSITORY = Path(__file__).resolve().parents[2]


def test_help_lists_every_benchmark_with_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in benchmark_names(FOLDER):
        assert f" {name}: " in text
    assert "overhead: The cost of the runtime where cells cost nothing" in text


def test_the_file_given_goes_before_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.touch()
    other.touch()
    monkeypatch.setenv(TREEBANK_VARIABLE, str(other))
    assert find_treebank(one) == one
    assert find_treebank() == other


def test_without_any_file_there_is_none_outside_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TREEBANK_VARIABLE, raising=False)
    usual = REPOSITORY / TRAIN
    assert find_treebank() == (usual if usual.exists() else None)


@pytest.mark.parametrize("way", ["--treebank", TREEBANK_VARIABLE])
def test_a_file_that_is_named_but_absent_is_refused_saying_where_to_get_it(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent.txt")
    monkeypatch.delenv(TREEBANK_VARIABLE, raising=False)
    if way == TREEBANK_VARIABLE:
        monkeypatch.setenv(way, absent)
    with pytest.raises(SystemExit, match="^2$"):
        main(["tree", *([way, absent] if way == "--treebank" else [])])
    assert ADDRESS in capsys.readouterr().err


def test_a_case_says_whether_its_trees_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "trees.txt").write_text("(1 (2 a) (3 (2 b) (2 a)))\n" * 3)
    title, trees, num_words = treebank_trees(tmp_path / "trees.txt")
    assert (title, len(trees), num_words) == ("treebank", 3, 2)
    title, trees, num_words = treebank_trees(None, 4)
    assert title.startswith("drawn trees")
    assert len(trees) == 4
    assert all(tree.tokens.max() < num_words for tree in trees)


@pytest.mark.parametrize("batch", GROWTH_BATCHES)
def test_each_number_of_live_nodes_is_measured_once(batch: int) -> None:
    numbers = growth_requests(batch)
    assert len(numbers) == len(set(numbers))
    assert numbers[0] >= batch
    assert numbers[-1] == max(LIVE_NODES) // LENGTH


def test_a_peer_that_is_not_installed_is_left_out_by_name_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert are_there("torch", "torch") and not capsys.readouterr().err
    assert not are_there("peer", "torch", "no_such_package")
    assert capsys.readouterr().err == "peer is left out: pip install no_such_package\n"


def test_a_chain_is_measured_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "are_there", lambda *_: False)
    lstm, table = torch.nn.LSTM(2, 2), torch.zeros(3, 2)
    assert set(chain.servers(lstm, table, [], chain.ALL_SERVERS)) == {
        name for name in chain.ALL_SERVERS if "onnx" not in name
    }
