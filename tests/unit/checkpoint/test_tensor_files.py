"""Tensor files have the same bytes as those of the safetensors library, and pickles run no code."""

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

from tunekit.checkpoint.safetensors_io import (
    DTYPES,
    SafetensorsHeader,
    SafetensorsWriter,
    TensorReader,
    read_pickle_header,
)
from tunekit.errors import UserError

Q = "model.layers.0.self_attn.q_proj.weight"


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def is_valid_name(name: str) -> bool:
    return name != "__metadata__" and name.isprintable()


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(is_valid_name),
    st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(list(DTYPES.values()))),
    max_size=6,
)


def tensor_bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@given(entries=tensors, order=st.randoms())
@settings(max_examples=60)
def test_bytes_equal_those_of_safetensors(entries: dict, order: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For all names, shapes, dtypes and orders of writing."""
    directory = tmp_path_factory.mktemp("files")
    expected = {name: random_tensor(*entry) for name, entry in entries.items()}
    save_file(expected, directory / "theirs", metadata={"format": "pt"})
    names = list(expected)
    order.shuffle(names)
    with SafetensorsWriter(directory / "ours", entries) as writer:
        for name in names:
            writer[name] = expected[name]
    assert (directory / "ours").read_bytes() == (directory / "theirs").read_bytes()
    header = SafetensorsHeader.read(directory / "ours").tensors
    with TensorReader(header) as reader:
        assert {name: (t.shape, t.dtype) for name, t in header.items()} == entries
        assert all(tensor_bytes(reader[name]) == tensor_bytes(tensor) for name, tensor in expected.items())
        for name, tensor in expected.items():
            mapped = reader.read_mapped(name)
            assert (mapped.shape, mapped.dtype) == (tensor.shape, tensor.dtype)
            assert tensor_bytes(mapped) == tensor_bytes(tensor)


def write_unusual_file(file: Path, metadata: dict | None) -> dict[str, Tensor]:
    """Write a file like other programs: tensors in another order, spaces in the header."""
    contents = {"b": torch.ones(3), "a": torch.zeros(2, 2).bfloat16(), "c": torch.tensor(5, dtype=torch.int64)}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, kind in (("c", "I64"), ("a", "BF16"), ("b", "F32")):
        tensor_data = bytes(tensor_bytes(contents[name]))
        header[name] = {
            "shape": list(contents[name].shape),
            "dtype": kind,
            "data_offsets": [len(data), len(data) + len(tensor_data)],
        }
        data += tensor_data
    text = json.dumps(header, indent=1).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return contents


def rewrite_file(file: Path, contents: dict[str, Tensor], like: Path) -> bytes:
    with SafetensorsWriter(
        file, {name: (tuple(t.shape), t.dtype) for name, t in contents.items()}, SafetensorsHeader.read(like)
    ) as writer:
        for name, tensor in contents.items():
            writer[name] = tensor
    return file.read_bytes()


def test_header_is_kept_exactly(tmp_path: Path) -> None:
    contents = write_unusual_file(tmp_path / "source", {"format": "pt", "made by": "hand"})
    assert rewrite_file(tmp_path / "out", contents, tmp_path / "source") == (tmp_path / "source").read_bytes()


@pytest.mark.parametrize("metadata", [None, {"made by": "hand"}, {"format": "mlx"}])
def test_format_is_always_in_the_metadata(metadata: dict | None, tmp_path: Path) -> None:
    """transformers needs the format in the metadata."""
    contents = write_unusual_file(tmp_path / "source", metadata)
    rewrite_file(tmp_path / "out", contents, tmp_path / "source")
    save_file(contents, tmp_path / "theirs", metadata=(metadata or {}) | {"format": "pt"})
    assert load_file(tmp_path / "out").keys() == contents.keys()
    assert (
        SafetensorsHeader.read(tmp_path / "out").tensors.keys()
        == SafetensorsHeader.read(tmp_path / "theirs").tensors.keys()
    )
    header_length = struct.unpack("<Q", (tmp_path / "out").read_bytes()[:8])[0]
    out_metadata = json.loads((tmp_path / "out").read_bytes()[8 : 8 + header_length])["__metadata__"]
    assert out_metadata == (metadata or {}) | {"format": "pt"}


def test_removed_tensor_changes_the_header(tmp_path: Path) -> None:
    contents = write_unusual_file(tmp_path / "source", {"format": "pt"})
    contents.pop("a")
    rewrite_file(tmp_path / "out", contents, tmp_path / "source")
    assert load_file(tmp_path / "out").keys() == {"b", "c"}


@given(offset=st.integers(0, 10_000), replacement=st.binary(max_size=40), cut=st.booleans())
def test_damaged_file_is_a_one_line_error(
    offset: int, replacement: bytes, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A damaged file is rejected in one line, or read to the same tensors as by the safetensors library."""
    file = tmp_path_factory.mktemp("damage") / "f.safetensors"
    save_file({Q: torch.ones(3, 5), "b": torch.ones(4).bfloat16()}, file, metadata={"format": "pt"})
    data = file.read_bytes()
    offset %= len(data)
    file.write_bytes(data[:offset] + replacement + (b"" if cut else data[offset + len(replacement) :]))
    try:
        header = SafetensorsHeader.read(file).tensors
    except UserError as error:
        assert str(file) in str(error)
        assert "\n" not in str(error)
        return
    expected = load_file(file)
    with TensorReader(header) as reader:
        assert header.keys() == expected.keys()
        for name, tensor in expected.items():
            assert reader[name].shape == tensor.shape
            assert tensor_bytes(reader[name]) == tensor_bytes(tensor)


def test_huge_header_length_uses_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 10**11) + b"{")
        stream.truncate(2 * 10**11)  # a sparse file of that length
    with pytest.raises(UserError, match=r"f\.safetensors"):
        SafetensorsHeader.read(file)


def test_file_truncated_during_reading_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(1000, 1000)}, file)
    with TensorReader(SafetensorsHeader.read(file).tensors) as reader:
        os.truncate(file, 5000)
        for read in (reader.__getitem__, reader.read_mapped):
            with pytest.raises(UserError, match=r"f\.safetensors: "):
                read("a")


def test_mapped_tensor_outlives_its_reader_and_does_not_change_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(1000, 1000)}, file)
    before = file.read_bytes()
    with TensorReader(SafetensorsHeader.read(file).tensors) as reader:
        first = reader.read_mapped("a")
        assert first.sum() == 10**6
        second = reader.read_mapped("a")
    first[3, 4] = 5
    file.unlink()
    assert (first.sum(), second.sum()) == (10**6 + 4, 10**6)
    file.write_bytes(before)
    with TensorReader(SafetensorsHeader.read(file).tensors) as reader:
        assert reader["a"].sum() == 10**6


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensor_is_read_in_chunks(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunekit.checkpoint.safetensors_io.CHUNK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    contents = {"a": torch.randn(77, 33), "b": torch.randn(5)}
    save_file(contents, tmp_path / "f.safetensors")
    with TensorReader(SafetensorsHeader.read(tmp_path / "f.safetensors").tensors) as reader:
        assert all(torch.equal(reader[name], tensor) for name, tensor in contents.items())


# Pickles


class Spy:
    """Creates a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.trace),))


def make_weights() -> dict[str, Tensor]:
    tied = torch.randn(4, 6)
    return {"a": tied, "b": tied, "c": torch.randn(8, 3).T, "d": torch.tensor(3.0).bfloat16()}


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_tensors_are_read(zipped: bool, tmp_path: Path) -> None:
    contents = make_weights()
    torch.save(contents, tmp_path / "w.bin", _use_new_zipfile_serialization=zipped)
    header = read_pickle_header(tmp_path / "w.bin")
    with TensorReader(header) as reader:
        for name, tensor in contents.items():
            assert (header[name].shape, header[name].dtype) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(reader[name], tensor)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_runs_no_code(zipped: bool, tmp_path: Path) -> None:
    file, trace = tmp_path / "w.bin", tmp_path / "was run"
    torch.save({"a": torch.ones(2), "b": Spy(trace)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError) as caught:
        read_pickle_header(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert not trace.exists()
    torch.load(file, weights_only=False)  # this would run it
    assert trace.exists()


@pytest.mark.parametrize("value", [
    {"state_dict": {"a": torch.ones(2)}, "epoch": 3},
    [torch.ones(2)],
    torch.ones(2),
    {"a": 1.0},
    {1: torch.ones(2)},
])  # fmt: skip
def test_pickle_without_named_tensors_is_rejected(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "w.bin")
    with pytest.raises(UserError, match=r"w\.bin: "):
        read_pickle_header(tmp_path / "w.bin")


def test_plain_pickle_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(pickle.dumps({"a": [1.0, 2.0]}))
    with pytest.raises(UserError, match=r"w\.bin: "):
        read_pickle_header(tmp_path / "w.bin")


@given(
    offset=st.integers(0, 10**6),
    replacement=st.binary(max_size=30),
    cut=st.booleans(),
    zipped=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_damaged_pickle_is_a_one_line_error(
    offset: int, replacement: bytes, cut: bool, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("damage") / "w.bin"
    torch.save({"a": torch.ones(2, 3)}, file, _use_new_zipfile_serialization=zipped)
    data = file.read_bytes()
    offset %= len(data)
    file.write_bytes(data[:offset] + replacement + (b"" if cut else data[offset + len(replacement) :]))
    try:
        header = read_pickle_header(file)
        with TensorReader(header) as reader:
            assert all(isinstance(reader[name], Tensor) for name in header)
    except UserError as error:
        assert str(file) in str(error)
        assert "\n" not in str(error)
