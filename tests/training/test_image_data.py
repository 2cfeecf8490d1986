"""Images of data files: their tokens are the family's own processor's, the cache names them and holds no pixels, and
what is wrong with one is said in a line with the record's number."""

import base64
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import xxhash
from PIL import Image
from transformers import AutoTokenizer

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.batch import BatchMaker, collate
from expertmesh.training.data.data_files import RowError
from expertmesh.training.data.image_files import kept_file, kept_images, samples_cache
from expertmesh.training.data.images import ImageReader
from expertmesh.training.data.pictures import ImageProcessor, Picture
from expertmesh.training.data.preview import print_preview, warnings_of
from expertmesh.training.data.record_kinds import SPLIT_TURNS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.data.tokenizing import DataOptions
from tests.families.configs import tiny_config
from tests.images import FAMILIES, image_config
from tests.pictures import (
    TOKENS,
    Plain,
    asked,
    content_of,
    data_url,
    drawn,
    pil_class_of,
    save_processor,
    save_processor_of,
    theirs,
    write_lines,
    written,
)
from tests.tiers import tiered
from tests.tiny import save_tokenizer

QUICK = ("glm4v_moe", "gemma4")
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "say what"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processor")
    save_processor(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def processor(directory: Path) -> ImageProcessor:
    return ImageProcessor(str(directory), image_config("qwen3_vl_moe"))


@pytest.fixture
def load(processor: ImageProcessor, tokenizer: Any) -> Callable[..., Samples]:
    def read(file: Path, length: int = 256, **options: Any) -> Samples:
        return load_samples(
            "--dataset", [str(file)], tokenizer, DataOptions(length, **{"images": processor, **options}), 0
        )

    return read


def check_samples(samples: Samples, records: Sequence[Plain], own: Any, maker: BatchMaker) -> None:
    """Tokens and pixels are those of transformers' own processor, each by itself and packed; image tokens are no
    targets."""
    assert maker.pictures is not None
    assert maker.images is not None
    for sample, (messages, images) in zip(samples, records, strict=True):
        text = own.apply_chat_template(messages, tokenize=False)
        wanted = own(text=[text], images=images or None, return_tensors="pt")
        assert sample.tokens == wanted["input_ids"][0].tolist()
        trained = {token for token, is_trained in zip(sample.tokens, sample.is_trained, strict=True) if is_trained}
        assert maker.pictures.token not in trained
        batch = collate([[sample]], maker=maker)
        assert (batch.images is None) == (not images)
        for name, value in {} if batch.images is None else batch.images.inputs.items():
            assert torch.equal(value, wanted[name]), name
    packed = collate([list(samples)], maker=maker).images
    assert packed is not None
    number = len(packed.inputs[maker.images.facts.inputs[1]])
    assert packed.counts[0] == number == sum(len(images) for _, images in records)


def test_tokens_are_the_processors_and_pixels_too(
    directory: Path, processor: ImageProcessor, load: Any, tmp_path: Path
) -> None:
    data, records = written(tmp_path)
    own, model = theirs(directory), build_model(image_config("qwen3_vl_moe"), images=True)
    maker = BatchMaker(images=ImageReader(model), pictures=processor)
    samples = load(data, train_on="all")
    check_samples(samples, records, own, maker)
    assert samples.lengths.tolist() == [len(sample.tokens) for sample in samples]


@pytest.mark.parametrize("family", tiered(QUICK, [f for f in FAMILIES if f not in QUICK]))
def test_every_familys_processor(family: str, tmp_path: Path) -> None:
    """Its tokens, whatever it writes around an image's, and what it makes of pixels; image tokens are never targets."""
    config = image_config(family)
    if pil_class_of(config) is None:
        pytest.skip(f"the processor of {family} needs torchvision")
    own = save_processor_of(tmp_path / "model", config)
    processor = ImageProcessor(str(tmp_path / "model"), config)
    maker = BatchMaker(images=ImageReader(build_model(config, images=True)), pictures=processor)
    data, records = written(tmp_path)
    options = DataOptions(2048, images=processor, train_on="all")
    samples = load_samples("--dataset", [str(data)], AutoTokenizer.from_pretrained(tmp_path / "model"), options, 0)
    check_samples(samples, records, own, maker)


def without_processor(directory: Path) -> None:
    (directory / "preprocessor_config.json").unlink()


def with_damaged_processor(directory: Path) -> None:
    (directory / "preprocessor_config.json").write_text("{")


def with_another_token(directory: Path) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra_special_tokens": {"image_token": "<290>"}}))


@pytest.mark.parametrize(
    ("change", "family", "said"),
    [
        (without_processor, "qwen3_vl_moe", "its processor cannot be loaded: .*preprocessor_config.json"),
        (with_damaged_processor, "qwen3_vl_moe", "its processor cannot be loaded: .*preprocessor_config.json"),
        (
            with_another_token,
            "qwen3_vl_moe",
            "its processor writes <290> for an image, token 290, and its config has 300;",
        ),
        (Path.exists, "mixtral", "its processor cannot be loaded: transformers has no processor for mixtral"),
    ],
)
def test_processors_that_cannot_be_used(change: Any, family: str, said: str, directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "model")
    change(tmp_path / "model")
    config = tiny_config(family) if family == "mixtral" else image_config(family)
    with pytest.raises(ExpertMeshError, match=f"--images: {tmp_path / 'model'}: {said}"):
        ImageProcessor(str(tmp_path / "model"), config)


def test_without_pillow(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertmesh.training.data.pictures.installed_version", lambda name: None)
    with pytest.raises(ExpertMeshError, match=r"Pillow, which is missing: pip install 'expertmesh\[images\]'"):
        ImageProcessor(str(directory), image_config("qwen3_vl_moe"))


def test_the_cache_names_images_and_changed_ones_are_refused(
    processor: ImageProcessor, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(content_of(drawn(70, 40, 0)))
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "path": "a.png"}, TEXT])])
    first = load(data)
    with monkeypatch.context() as changed:
        changed.setattr(processor, "tokens", None)
        (sample,) = load(data)
    assert sample == first[0]
    assert first.dataset.column_names == load(data).dataset.column_names
    (record,) = first.dataset[0]["images"]
    assert (record.startswith(f"{sample.images[0].digest}:"), record.endswith(f":{file}")) == (True, True)
    assert processor.pixels(sample.images[0])["pixel_values"].shape == (8, 1536)
    file.write_bytes(content_of(drawn(70, 40, 1)))
    with pytest.raises(ExpertMeshError, match=r"a.png: is another image than when the data were tokenized"):
        processor.pixels(sample.images[0])
    file.unlink()
    with pytest.raises(ExpertMeshError, match=r"a.png cannot be read: No such file"):
        processor.pixels(sample.images[0])


def seen(samples: Samples) -> list[str]:
    """The checksums of what is trained on."""
    assert samples.image_digests == [image.digest for sample in samples for image in sample.images]
    return samples.image_digests or []


def test_images_are_those_of_the_folder_that_was_given(load: Any, tmp_path: Path) -> None:
    """Whatever directory a link to the data leads to, as in the hub's cache."""
    shared = write_lines(tmp_path / "blob", [asked([{**IMAGE, "path": "img/a.png"}, TEXT])])
    for seed, name in enumerate(("one", "two")):
        (tmp_path / name / "img").mkdir(parents=True)
        (tmp_path / name / "img" / "a.png").write_bytes(content_of(drawn(70, 40, seed)))
        (tmp_path / name / "data.jsonl").symlink_to(shared)
    one, two = (load(tmp_path / name / "data.jsonl")[0].images[0] for name in ("one", "two"))
    assert [Path(image.path).parent for image in (one, two)] == [tmp_path / name / "img" for name in ("one", "two")]
    assert one.digest != two.digest
    assert load(tmp_path / "one" / "data.jsonl")[0].images == (one,)


def points_elsewhere(image: Path, other: Path) -> None:
    image.unlink()
    image.symlink_to(other)


def is_replaced(image: Path, other: Path) -> None:
    """By one of the same size and time, as an archive has it."""
    content, before = other.read_bytes(), image.resolve().stat()
    (image.parent / "new").write_bytes(content)
    os.utime(image.parent / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (image.parent / "new").replace(image)


def is_written(image: Path, other: Path) -> None:
    image.resolve().write_bytes(other.read_bytes())


@pytest.mark.parametrize("change", [points_elsewhere, is_replaced, is_written])
def test_a_changed_image_is_looked_at_again(
    change: Callable[[Path, Path], None], load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the new one is as large, and takes as many tokens."""
    for seed, name in enumerate(("first", "second")):
        (tmp_path / f"{name}.bmp").write_bytes(content_of(drawn(70, 40, seed), "BMP"))
    link = tmp_path / "a.bmp"
    link.symlink_to(tmp_path / "first.bmp")
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "path": link.name}, TEXT])])
    (before,) = seen(load(data))
    change(link, tmp_path / "second.bmp")
    wanted = xxhash.xxh3_64_hexdigest((tmp_path / "second.bmp").read_bytes())
    assert seen(load(data)) == [wanted] != [before]
    with monkeypatch.context() as changed:  # which a later start finds in the cache
        changed.setattr(ImageProcessor, "tokens", None)
        assert seen(load(data)) == [wanted]


def test_an_image_that_was_cut_off_is_looked_at_again_too(load: Any, tmp_path: Path) -> None:
    """As a smaller one may have its place."""
    file = tmp_path / "a.png"
    file.write_bytes(content_of(drawn(128, 128, 0)))
    again = asked("hello")["messages"] + asked([{**IMAGE, "path": "a.png"}, TEXT])["messages"]
    data = write_lines(tmp_path / "data.jsonl", [{"messages": again}])
    assert seen(load(data, 32)) == []
    file.write_bytes(content_of(drawn(32, 32, 0)))
    assert len(seen(load(data, 32))) == 1
    file.unlink()
    with pytest.raises(ExpertMeshError, match=r"data.jsonl: line 1: the image .*a.png cannot be read: No such file"):
        load(data, 32)


def test_what_was_wrong_with_an_image_is_not_kept(load: Any, tmp_path: Path) -> None:
    """It may be mended beside the data."""
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "path": "a.png"}, TEXT])])
    with pytest.raises(ExpertMeshError, match=r"a.png', and there is no such file"):
        load(data)
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(ExpertMeshError, match=r"a.png cannot be read: it is none of"):
        load(data)
    (tmp_path / "a.png").write_bytes(content_of(drawn(70, 40, 0)))
    assert len(seen(load(data))) == 1


def test_checksums_are_compared_while_data_are_prepared(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what a file system does not tell."""
    image, other = (content_of(drawn(70, 40, seed), "BMP") for seed in (0, 1))
    (tmp_path / "a.bmp").write_bytes(image)
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "path": "a.bmp"}, TEXT])])
    monkeypatch.setattr("expertmesh.training.data.image_files.identity", lambda path: "the same")
    monkeypatch.setattr("expertmesh.training.data.tokenizing.identity", lambda path: "the same")
    (before,) = seen(load(data))
    (tmp_path / "a.bmp").write_bytes(other)
    assert seen(load(data)) == [before]
    assert seen(load(data, fetches=True)) == [xxhash.xxh3_64_hexdigest(other)]


def test_images_that_the_cache_has_lost_or_damaged(load: Any, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "url": data_url(drawn(71, 40, 5))}, TEXT])])
    kept = Path(load(data)[0].images[0].path)
    assert kept.parent == kept_images()
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + b"x")
    with pytest.raises(ExpertMeshError, match=f"line 1: the image {kept} is damaged; delete {samples_cache()}, and"):
        load(data)
    kept.unlink()
    with pytest.raises(ExpertMeshError, match=f"the image {kept} is missing; delete that directory"):
        load(data)
    kept.write_bytes(content)
    assert len(load(data)) == 1


def test_a_photo_stands_as_its_camera_was_held(processor: ImageProcessor, tmp_path: Path) -> None:
    """By the orientation in its EXIF data, in tokens and pixels."""
    upright, exif = drawn(96, 32, 0), Image.Exif()
    exif[0x0112] = 6  # turned to the left in the file
    (tmp_path / "a.png").write_bytes(content_of(upright))
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    pixels, tokens = [], []
    for name in ("a.png", "turned.png"):
        digest, own = processor.tokens(str(tmp_path / name))
        tokens.append(own)
        pixels.append(processor.pixels(Picture(str(tmp_path / name), digest, 0, len(own))))
    assert tokens[0] == tokens[1]
    assert pixels[0]["image_grid_thw"].tolist() == pixels[1]["image_grid_thw"].tolist() == [[1, 2, 6]]
    assert torch.equal(pixels[0]["pixel_values"], pixels[1]["pixel_values"])


def test_another_processor_makes_other_samples(directory: Path, load: Any, tmp_path: Path) -> None:
    """Of the same data, whose samples with the first one stay in the cache."""
    (tmp_path / "a.png").write_bytes(content_of(drawn(128, 128, 0)))
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "path": "a.png"}, TEXT])])
    before = load(data).tokens_of_images.tolist()
    shutil.copytree(directory, tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": size}))
    smaller = ImageProcessor(str(tmp_path / "model"), image_config("qwen3_vl_moe"))
    assert (before, load(data, images=smaller).tokens_of_images.tolist()) == ([16], [4])
    assert load(data).tokens_of_images.tolist() == before


def test_bytes_of_an_image_feature(processor: ImageProcessor, load: Any, tmp_path: Path) -> None:
    import datasets

    image = drawn(64, 32, 0)
    rows: list[Any] = [
        {"prompt": "say", "response": "hello", "image": image},
        {"prompt": "say", "response": "hi", "image": None},
    ]
    data: Any = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "data.parquet")
    data.save_to_disk(str(tmp_path / "saved"))
    for place in (tmp_path / "data.parquet", tmp_path / "saved"):
        with_image, without = load(place)
        assert len(with_image.images) == 1
        assert not without.images
        path = Path(with_image.images[0].path)
        assert path.parent.name == "images"
        assert processor.tokens(str(path))[1] == [processor.token] * 2


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (asked([{**IMAGE, "path": "none.png"}, TEXT]), "none.png', and there is no such file"),
        (asked([{**IMAGE, "path": "text.png"}, TEXT]), "text.png cannot be read: it is none of JPEG, PNG, .*begins"),
        (asked([{**IMAGE, "path": "half.png"}, TEXT]), "half.png cannot be read: .*truncated"),
        (asked([{**IMAGE, "image": "data:image/png;base64,a"}, TEXT]), "whose base64 is damaged"),
        (asked([{**IMAGE, "url": "data:image/png,a"}, TEXT]), "which is no base64"),
        (asked([{**IMAGE, "url": "https://x.y/a.png"}, TEXT]), "which only --prepare-only fetches"),
        (asked([{**IMAGE, "path": "a.png", "url": "b"}]), "has path and url; leave out all but one"),
        (asked([{**IMAGE, "file": "a.png"}]), "has file; an image has one of bytes, base64, path"),
        (asked([{"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}]), "has detail 'low'"),
        (asked([IMAGE, TEXT]), "has 0 images in its column, and 1 places"),
        (asked("<image>a<image>", images=["a.png"]), "has 1 images in its column, and 2 places"),
        (asked("<|image_pad|>"), r"writes <\|image_pad\|> 1 times for 0 images"),
        (asked([{"type": "video", "video": "a.mp4"}]), "content has a part that is not one of"),
        (asked("a", videos=["a.mp4"]), "has videos; it is not text or images"),
        (asked("a", images=[3]), "images, image 1 is 3; give a path"),
        (asked("a", images=["a.png"], image="a.png"), "has images and image; leave one out"),
        (asked("a", image_path="a.png", image_url="a.png"), "has image_path and image_url; leave one out"),
        (asked("a", Images=["a.png"]), "has the column Images, in which no images are looked for: rename it to one of"),
        (asked("a", photo_file="a.png"), "has the column photo_file, in which no images are looked for"),
        (asked("<image>a"), "has <image> in its text, .* no images; give them in one of the columns images, image, "),
        (asked([{**IMAGE, "path": "a.png"}, {**TEXT, "text": "<image>"}]), "parts with images; leave it out"),
        (asked([{**IMAGE, "index": 1}], images=["a.png"]), r"parts with the indices \[1\]; give a part with its index"),
        (asked([{**IMAGE, "index": 0}, IMAGE], images=["a.png"]), r"indices \[0\] and without any"),
        (asked([{**IMAGE, "index": 0, "path": "a.png"}], images=["a.png"]), "has index 0; give the number of an image"),
        (asked("a <|video_pad|>"), r"has <\|video_pad\|> in its text, the video_token_id of the model: only images"),
        (
            asked("<image>find <ref-object>", "<bbox>", images=["a.png"], objects={"ref": ["x"]}),
            "has objects and <ref-object> and <bbox> in its text",
        ),
        (asked([{**IMAGE, "image": "A" * 5000}, TEXT]), "AAAA.*, and there is no such file"),
        (asked([{**IMAGE, "path": "locked/a.png"}, TEXT]), "a.png', which cannot be read: Permission denied"),
    ],
)
def test_what_is_refused(record: Any, said: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = content_of(drawn(70, 40, 0))
    (tmp_path / "a.png").write_bytes(content)
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no image")
    ask = Path.stat  # which for root finds all

    def stat(path: Path, **kwargs: Any) -> Any:
        if "locked" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ask(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)
    data = write_lines(tmp_path / "data.jsonl", [asked("say hello"), record])
    with pytest.raises(ExpertMeshError, match=rf"data.jsonl: line 2:? .*{said}"):
        load(data)


def test_columns_that_are_read(load: Any, tmp_path: Path) -> None:
    """Also those that often say only where an image is from, unless the record has the image; and in which order."""
    contents = [content_of(drawn(70, 40, seed)) for seed in (0, 1)]
    for name, content in zip("ab", contents, strict=True):
        (tmp_path / f"{name}.png").write_bytes(content)
    bare = base64.b64encode(contents[0]).decode()
    indexed = [{**IMAGE, "index": 1, "text": None}, {**TEXT, "index": None}, {**IMAGE, "index": 0}]
    rows: list[tuple[Any, str]] = [
        (asked("say", image_path="a.png"), "a"),
        (asked("say", image_url="b.png"), "b"),
        ({"question": "say", "answer": "world", "file_name": "a.png"}, "a"),
        (asked("say", file_name="main.py"), ""),
        (asked("say", image="b.png", image_path="elsewhere.png", image_url="https://x.y/z.png"), "b"),
        (asked([{**IMAGE, "image": bare}, TEXT]), "a"),
        (asked("say", image=bare), "a"),
        (asked(indexed, images=["a.png", "b.png"]), "ba"),
    ]
    digests = {name: xxhash.xxh3_64_hexdigest(content) for name, content in zip("ab", contents, strict=True)}
    for number, (row, wanted) in enumerate(rows):
        found = load(write_lines(tmp_path / f"{number}.jsonl", [row]))
        assert (number, seen(found)) == (number, [digests[name] for name in wanted])
        assert found.num_images == len(wanted)


def test_another_tokenizer_has_the_models_tokens_of_images(
    directory: Path, processor: ImageProcessor, tokenizer: Any
) -> None:
    processor.check_tokenizer(tokenizer, "own")
    save_tokenizer(directory / "plain")
    plain: Any = AutoTokenizer.from_pretrained(directory / "plain")
    with pytest.raises(ExpertMeshError, match=r"--tokenizer plain: its token 300 is none, .* writes <\|image_pad\|>"):
        processor.check_tokenizer(plain, "plain")
    plain.add_tokens([f"<{number}>" for number in range(len(plain), 300)] + [TOKENS[0], "<|other|>"])
    with pytest.raises(ExpertMeshError, match=r"its token 301 is <\|other\|>, and .* writes <\|video_pad\|>"):
        processor.check_tokenizer(plain, "shifted")


def test_without_the_flag_images_are_refused(load: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content_of(drawn(70, 40, 0)))
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "path": "a.png"}, TEXT])])
    load(data)  # which must not be found in the cache
    with pytest.raises(ExpertMeshError, match="line 1 has images; give --images"):
        load(data, images=None)
    text = write_lines(tmp_path / "text.jsonl", [{"text": "say", "images": ["a.png"]}])
    with pytest.raises(ExpertMeshError, match="line 1 has images; images are read as parts"):
        load(text)


def test_an_image_that_would_be_cut_is_dropped_whole(load: Any, tmp_path: Path) -> None:
    url = data_url(drawn(128, 128, 0))  # 16 tokens
    record = {
        "messages": [
            {"role": "user", "content": [{**IMAGE, "url": url}, TEXT]},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": [{**IMAGE, "url": url}]},
            {"role": "assistant", "content": "world"},
        ]
    }
    data = write_lines(tmp_path / "data.jsonl", [record])
    (whole,) = load(data)
    first, second = whole.images
    assert (first.end - first.begin, second.end - second.begin) == (16, 16)
    for length in range(second.begin - 1, second.end + 2):
        samples = load(data, length)
        (cut,) = samples
        is_whole = length >= second.end
        assert cut.images == (whole.images if is_whole else (first,))
        assert len(cut.tokens) == (length if is_whole else min(length, second.begin))
        assert samples.lengths.tolist() == [len(cut.tokens)]
        (origin,) = samples.origins
        assert (origin.images_cut is None) == is_whole
        assert is_whole or "1 of 1 record lose images that do not end within" in "\n".join(warnings_of(origin, length))
        assert bool(samples.is_cut.all())
    with pytest.raises(ExpertMeshError, match="no record has a trained token within --max-seq-length 12"):
        load(data, 12)


def test_preview(
    load: Any, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "a.png").write_bytes(content_of(drawn(70, 40, 0)))
    data = write_lines(tmp_path / "data.jsonl", [asked([TEXT, {**IMAGE, "path": "a.png"}])])
    print_preview(make_rows(load(data), False, 256, 0), DataOrder(1, 1, 1, 1, seed=0), tokenizer, 256)
    printed = capsys.readouterr().out
    assert "say what<|vision_start|>[image " in printed
    assert "a.png: 2 tokens]<|vision_end|></s>" in printed
    assert "images       1 of 2 tokens" in printed
    assert "«world</s>»" in printed


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.png").write_bytes(content_of(drawn(70, 40, 0)))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "web"))) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def test_the_web_is_asked_while_data_are_prepared(server: str, load: Any, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "url": f"{server}/a.png"}, TEXT])])
    with pytest.raises(ExpertMeshError, match="which only --prepare-only fetches"):
        load(data)
    prepared = load(data, fetches=True)
    (tmp_path / "web" / "a.png").unlink()
    assert load(data)[0] == prepared[0]
    other = write_lines(tmp_path / "other.jsonl", [asked([{**IMAGE, "url": f"{server}/b.png"}, TEXT])])
    with pytest.raises(ExpertMeshError, match=r"b.png', which cannot be fetched: HTTP Error 404"):
        load(other, fetches=True)


class _Moody(BaseHTTPRequestHandler):
    """Answers by the path, and by how often it was asked."""

    asked: ClassVar[list[str]] = []
    image = content_of(drawn(70, 40, 3))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        is_first = self.asked.count(self.path) == 1
        code, content, length = 200, self.image, len(self.image)
        if "always-busy" in self.path or ("busy" in self.path and is_first):
            content, length = b"<html>busy", 10
        elif "short" in self.path and is_first:
            content = content[:100]
        elif "failing" in self.path and is_first:
            code = 503
        elif "missing" in self.path:
            code = 404
        elif "elsewhere" in self.path:
            code = 302
        self.send_response(code)
        self.send_header("Content-Length", str(length))
        self.send_header("Location", "file:///etc/hostname")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("expertmesh.training.data.image_files._PAUSE", 0.0)
    monkeypatch.setattr(_Moody, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), _Moody) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "said", "times"),
    [
        ("good", "", 1),
        ("with a space", "", 1),
        ("busy", "", 2),
        ("short", "", 2),
        ("failing", "", 2),
        ("always-busy", "tried 3 times: it is no image: it is none of JPEG, .* begins with b'<html>busy'", 3),
        ("missing", "HTTP Error 404", 1),
        ("elsewhere", "file:///etc/hostname", 1),
    ],
)
def test_what_the_web_answers(name: str, said: str, times: int, moody: str, tmp_path: Path) -> None:
    """Of what is no image nothing is kept, and what may pass is asked for again."""

    def fetch() -> Path:
        return Path(kept_file(f"{moody}/{name}.png", tmp_path, fetches=True))

    if said:
        for _ in range(2):
            with pytest.raises(RowError, match=f"which cannot be fetched.*{said}"):
                fetch()
        assert len(_Moody.asked) == 2 * times
    else:
        assert fetch().read_bytes() == _Moody.image == fetch().read_bytes()
        assert len(_Moody.asked) == times


def test_what_the_web_may_answer_is_bounded(moody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as small:
        small.setattr("expertmesh.training.data.image_files._MOST_BYTES", len(_Moody.image) - 1)
        with pytest.raises(RowError, match=r"cannot be fetched: it is larger than 0 MiB"):
            kept_file(f"{moody}/large.png", tmp_path, fetches=True)
    monkeypatch.setattr("expertmesh.training.data.image_files._SECONDS", 0.0001)
    with pytest.raises(RowError, match="cannot be fetched, tried 3 times"):
        kept_file(f"{moody}/slow.png", tmp_path, fetches=True)
    for url in ("http:///x.png", "http://127.0.0.1:99999/x.png"):
        with pytest.raises(RowError, match="which cannot be fetched"):
            kept_file(url, tmp_path, fetches=True)


def test_a_copy_that_is_no_image_is_fetched_again(moody: str, load: Any, tmp_path: Path) -> None:
    """As an earlier release has kept them."""
    url = f"{moody}/again.png"
    kept_images().mkdir(parents=True, exist_ok=True)
    copy = kept_images() / f"url-{xxhash.xxh3_128_hexdigest(url.encode())}"
    copy.write_text("<html>busy</html>")
    with pytest.raises(RowError, match="which only --prepare-only fetches"):
        kept_file(url, tmp_path, fetches=False)
    assert Path(kept_file(url, tmp_path, fetches=True)).read_bytes() == _Moody.image == copy.read_bytes()


def test_a_full_disk_is_told_as_such(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an image that cannot be read is not taken for one."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = write_lines(tmp_path / "data.jsonl", [asked([{**IMAGE, "url": data_url(drawn(73, 41, 6))}, TEXT])])
    with monkeypatch.context() as patched:
        patched.setattr("expertmesh.training.data.image_files.whole", full)
        with pytest.raises(ExpertMeshError, match="images of the data cannot be written there: No space left"):
            load(data)
    monkeypatch.setattr("expertmesh.training.data.tokenizing.kept_file", full)
    with pytest.raises(ExpertMeshError, match=r"line 1 names what cannot be read: .*No space left"):
        load(data)


def test_each_answer_has_the_images_before_it(load: Any, tmp_path: Path) -> None:
    url = data_url(drawn(70, 40, 0))
    messages = asked([{**IMAGE, "url": url}])["messages"] + asked([{**IMAGE, "url": url}, TEXT])["messages"]
    data = write_lines(tmp_path / "data.jsonl", [{"messages": messages}])
    assert [len(sample.images) for sample in load(data, kind=SPLIT_TURNS)] == [1, 2]
