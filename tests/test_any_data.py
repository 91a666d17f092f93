"""Archives and trees of any names, kinds and damage: exactly what went in, or an error.

FUZZ_EXAMPLES=8000 tries so many of each kind, others each time: half an hour.
"""

import os
import re
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from drawn_imagenet import tar_bytes, write_zip
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_prepare_data import JPEG, NODE, Images, StagingError, call

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
IMAGES = ["1.jpg", "2.JPEG", "é.png", "deep/1.webp", "a b.Jpg", "l" * 120 + ".jpg"]
OTHERS = ["1.bmp", ".hid.jpg", "._1.jpg", "x.txt", "Makefile"]
PLACES = [
    f"{split}/{name}/" for split in ("train", "val") for name in ("a", "val", "ü")
]
BYTES = st.binary(max_size=700).map(JPEG.__add__)
FILES = st.dictionaries(
    st.tuples(st.sampled_from(PLACES), st.sampled_from([*IMAGES, *OTHERS])).map("".join)
    | st.sampled_from(["README", "train/1.jpg", "test/a/1.jpg"]),
    BYTES,
)
# All classes have images of both splits, or some do.
FULL = st.fixed_dictionaries({place + IMAGES[0]: BYTES for place in PLACES})
FILES = FILES | st.tuples(FULL, FILES).map(lambda pair: pair[0] | pair[1])
DAMAGE = {
    "none": lambda data, *_: data,
    "flip": lambda data, at, size: (
        data[:at] + bytes([data[at] ^ size]) + data[at + 1 :]
    ),
    "cut": lambda data, at, _: data[:at],
    "lost": lambda data, at, size: data[:at] + data[at + size :],
    "twice": lambda data, *_: data + data,
    "behind": lambda data, *_: data + b"behind",
    "before": lambda data, *_: b"before" + data,
}


def write(kind: str, path: Path, files: dict[str, bytes]) -> None:
    if kind == "tree":
        for name in files:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(files[name])
        for split in ("train", "val"):
            (path / split).mkdir(parents=True, exist_ok=True)
    elif kind.endswith("tar"):
        form = tarfile.GNU_FORMAT if kind == "gnu.tar" else tarfile.PAX_FORMAT
        path.write_bytes(tar_bytes(files, format=form))
    else:
        compression = zipfile.ZIP_DEFLATED if kind == "deflated.zip" else 0
        write_zip(path, files, compression)


def read(data_dir: Path) -> dict[str, bytes]:
    """Return the images. Raises what reading raises."""
    found = {}
    for split in ("train", "val"):
        images = Images(data_dir, split)
        for i, name in enumerate(images.index["name"].tolist()):
            assert images.classes[images.labels[i]] == name.decode().split("/")[0]
            try:
                data = images.read_bytes(i).numpy().tobytes()
            except Exception as error:  # as read() does
                raise StagingError(f"decode image {images.name(i)}: {error}") from None
            found[f"{split}/{name.decode()}"] = data
    return found


@pytest.mark.parametrize(
    "kind", ["gnu.tar", "pax.tar", "stored.zip", "deflated.zip", "tree"]
)
def test_any_data(kind, caplog):
    @settings(
        max_examples=EXAMPLES or 50,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # to make an example smaller may take minutes
    )
    @given(
        FILES,
        st.sampled_from(sorted(DAMAGE)),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 100),
    )
    def check(files, damage, place, size):
        placed = [name for name in files if name.startswith(tuple(PLACES))]
        visible = [name for name in placed if "/." not in name]
        images = {n: files[n] for n in visible if n.endswith(tuple(IMAGES))}
        # Of a tree, all folders are seen.
        classes = {n.split("/")[1] for n in (placed if kind == "tree" else visible)}
        both = {(split, name) for split in ("train", "val") for name in classes}
        usable = {tuple(name.split("/")[:2]) for name in images} == both
        usable &= len(classes) > 1
        caplog.clear()
        with tempfile.TemporaryDirectory() as folder, caplog.at_level("INFO"):
            source = data_dir = Path(folder, kind)
            write(kind, source, files)
            output = ""
            if kind == "tree":
                damage = "none"
            else:
                data_dir = Path(folder, "data")
                whole = source.read_bytes()
                source.write_bytes(DAMAGE[damage](whole, int(place * len(whole)), size))
                code, output = call(source, data_dir)
                lines = output.splitlines()
                errors = [line for line in lines if not line.startswith(f"{NODE}: ")]
                assert (code, len(errors)) in ((0, 0), (1, 1)), output
            try:
                found = read(data_dir)
            except (StagingError, FileNotFoundError) as error:
                assert not usable or damage != "none", (output, error)
                assert kind in f"{output} {error}"
                # What has a checksum may be found out when it is read.
                assert os.listdir(folder) == [kind] or "decode image" in str(error)
                return
        assert usable or damage == "flip", output
        # A zip is whole beside other bytes. Of two in one, the last one is read.
        around = damage in ("twice", "behind", "before")
        assert kind.endswith("zip") or not around, output
        if damage == "flip" and kind.endswith("tar"):
            # A tar has no checksum of an image's bytes.
            changed = {name for name in found if found[name] != images[name]}
            assert len(found) == len(images) and len(changed) <= 1
        else:
            assert found == images
            counts = re.findall("left out: (.*)", output + caplog.text)
            left_out = sum(int(n) for n in re.findall(r"(\d+) ", "".join(counts)))
            outside = sum(name.startswith(("README", "test")) for name in files)
            outside *= kind == "tree"  # it is not looked for there
            assert left_out == len(files) - len(images) - outside

    check()
