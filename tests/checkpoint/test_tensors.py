"""Files of tensors, read and written: the same bytes as the safetensors library, and nothing run from a pickle."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tunekit.checkpoint.safetensors_io import DTYPES, SafetensorsWriter, TensorReader, read_header, read_pickle_header
from tunekit.errors import UserError

Q = "model.layers.0.self_attn.q_proj.weight"


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(list(DTYPES.values()))),
    max_size=6,
)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@given(entries=tensors, order=st.randoms())
@settings(max_examples=60)
def test_the_bytes_are_those_of_the_library(
    entries: dict, order: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the names, shapes and dtypes, and whatever order the tensors come in."""
    folder = tmp_path_factory.mktemp("files")
    held = {name: filled(*entry) for name, entry in entries.items()}
    save_file(held, folder / "theirs", metadata={"format": "pt"})
    names = list(held)
    order.shuffle(names)
    with SafetensorsWriter(folder / "ours", entries) as writer:
        for name in names:
            writer[name] = held[name]
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    found = read_header(folder / "ours")
    with TensorReader(found) as reader:
        assert {name: (t.shape, t.dtype) for name, t in found.items()} == entries
        assert all(bits(reader[name]) == bits(tensor) for name, tensor in held.items())
        for name, tensor in held.items():
            lent = reader.lend(name)
            assert (lent.shape, lent.dtype) == (tensor.shape, tensor.dtype)
            assert bits(lent) == bits(tensor)


def odd(file: Path, metadata: dict | None) -> dict[str, Tensor]:
    """A file that another program wrote: tensors in another order, spaces in its header."""
    held = {"b": torch.ones(3), "a": torch.zeros(2, 2).bfloat16(), "c": torch.tensor(5, dtype=torch.int64)}
    told: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, kind in (("c", "I64"), ("a", "BF16"), ("b", "F32")):
        raw = bytes(bits(held[name]))
        told[name] = {"shape": list(held[name].shape), "dtype": kind, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(told, indent=1).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return held


def rewritten(file: Path, held: dict[str, Tensor], like: Path) -> bytes:
    with SafetensorsWriter(file, {name: (tuple(t.shape), t.dtype) for name, t in held.items()}, like) as writer:
        for name, tensor in held.items():
            writer[name] = tensor
    return file.read_bytes()


def test_a_header_is_kept_to_the_byte(tmp_path: Path) -> None:
    held = odd(tmp_path / "source", {"format": "pt", "made by": "hand"})
    assert rewritten(tmp_path / "out", held, tmp_path / "source") == (tmp_path / "source").read_bytes()


@pytest.mark.parametrize("metadata", [None, {"made by": "hand"}, {"format": "mlx"}])
def test_the_format_is_always_told(metadata: dict | None, tmp_path: Path) -> None:
    """Without it transformers does not open a file."""
    held = odd(tmp_path / "source", metadata)
    rewritten(tmp_path / "out", held, tmp_path / "source")
    save_file(held, tmp_path / "theirs", metadata=(metadata or {}) | {"format": "pt"})
    assert load_file(tmp_path / "out").keys() == held.keys()
    assert read_header(tmp_path / "out").keys() == read_header(tmp_path / "theirs").keys()
    begin = struct.unpack("<Q", (tmp_path / "out").read_bytes()[:8])[0]
    told = json.loads((tmp_path / "out").read_bytes()[8 : 8 + begin])["__metadata__"]
    assert told == (metadata or {}) | {"format": "pt"}


def test_a_tensor_less_or_more_changes_the_header(tmp_path: Path) -> None:
    held = odd(tmp_path / "source", {"format": "pt"})
    held.pop("a")
    rewritten(tmp_path / "out", held, tmp_path / "source")
    assert load_file(tmp_path / "out").keys() == {"b", "c"}


@given(at=st.integers(0, 10_000), what=st.binary(max_size=40), cut=st.booleans())
def test_no_damage_is_more_than_a_line(
    at: int, what: bytes, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file that was damaged anywhere is refused in a line, or what it holds has the length that its shape says."""
    file = tmp_path_factory.mktemp("damage") / "f.safetensors"
    save_file({Q: torch.ones(3, 5), "b": torch.ones(4).bfloat16()}, file, metadata={"format": "pt"})
    data = file.read_bytes()
    at %= len(data)
    file.write_bytes(data[:at] + what + (b"" if cut else data[at + len(what) :]))
    try:
        found = read_header(file)
    except UserError as error:
        assert str(file) in str(error)
        assert "\n" not in str(error)
        return
    with TensorReader(found) as reader:
        for name, stored in found.items():
            assert reader[name].shape == stored.shape


def test_a_header_of_100_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 10**11) + b"{")
        stream.truncate(2 * 10**11)  # as long as it says: a file with a hole
    with pytest.raises(UserError, match="damaged or cut off"):
        read_header(file)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(1000, 1000)}, file)
    with TensorReader(read_header(file)) as reader:
        os.truncate(file, 5000)
        for take in (reader.__getitem__, reader.lend):
            with pytest.raises(UserError, match=r"f\.safetensors: became shorter while it was read"):
                take("a")


def test_a_lent_tensor_outlives_its_reader_and_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(1000, 1000)}, file)
    before = file.read_bytes()
    with TensorReader(read_header(file)) as reader:
        lent = reader.lend("a")
        assert lent.sum() == 10**6
        again = reader.lend("a")
    lent[3, 4] = 5
    file.unlink()
    assert (lent.sum(), again.sum()) == (10**6 + 4, 10**6)
    file.write_bytes(before)
    with TensorReader(read_header(file)) as reader:
        assert reader["a"].sum() == 10**6


@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_tensor_is_read_in_parts(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunekit.checkpoint.safetensors_io.CHUNK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    held = {"a": torch.randn(77, 33), "b": torch.randn(5)}
    save_file(held, tmp_path / "f.safetensors")
    with TensorReader(read_header(tmp_path / "f.safetensors")) as reader:
        assert all(torch.equal(reader[name], tensor) for name, tensor in held.items())


# Pickles


class Spy:
    """Does something when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.trace),))


def weights() -> dict[str, Tensor]:
    shared = torch.randn(4, 6)
    return {"a": shared, "b": shared, "c": torch.randn(8, 3).T, "d": torch.tensor(3.0).bfloat16()}


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_tensors(zipped: bool, tmp_path: Path) -> None:
    held = weights()
    torch.save(held, tmp_path / "w.bin", _use_new_zipfile_serialization=zipped)
    found = read_pickle_header(tmp_path / "w.bin")
    with TensorReader(found) as reader:
        for name, tensor in held.items():
            assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(reader[name], tensor)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_run(zipped: bool, tmp_path: Path) -> None:
    file, trace = tmp_path / "w.bin", tmp_path / "was run"
    torch.save({"a": torch.ones(2), "b": Spy(trace)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError) as caught:
        read_pickle_header(file)
    assert str(caught.value).startswith(f"{file}: holds more than tensors, or is damaged (")
    assert str(caught.value).endswith("nothing of it was run")
    assert "\n" not in str(caught.value)
    assert not trace.exists()
    torch.load(file, weights_only=False)  # that it could have been
    assert trace.exists()


@pytest.mark.parametrize("value", [
    {"state_dict": {"a": torch.ones(2)}, "epoch": 3},
    [torch.ones(2)],
    torch.ones(2),
    {"a": 1.0},
    {1: torch.ones(2)},
])  # fmt: skip
def test_pickles_of_other_things(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "w.bin")
    with pytest.raises(UserError, match="holds no tensors by name, so these are no weights of a model"):
        read_pickle_header(tmp_path / "w.bin")


def test_a_pickle_of_python(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(pickle.dumps({"a": [1.0, 2.0]}))
    with pytest.raises(UserError, match=r"w\.bin: holds "):
        read_pickle_header(tmp_path / "w.bin")


@given(
    at=st.integers(0, 10**6),
    what=st.binary(max_size=30),
    cut=st.booleans(),
    zipped=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_damage_of_a_pickle_is_more_than_a_line(
    at: int, what: bytes, cut: bool, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("damage") / "w.bin"
    torch.save({"a": torch.ones(2, 3)}, file, _use_new_zipfile_serialization=zipped)
    data = file.read_bytes()
    at %= len(data)
    file.write_bytes(data[:at] + what + (b"" if cut else data[at + len(what) :]))
    try:
        found = read_pickle_header(file)
        with TensorReader(found) as reader:
            assert all(isinstance(reader[name], Tensor) for name in found)
    except UserError as error:
        assert str(file) in str(error)
        assert "\n" not in str(error)
