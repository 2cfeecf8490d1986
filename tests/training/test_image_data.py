"""Images of data files: their tokens are the family's own processor's, the cache names them and holds no pixels, and
what is wrong with one is said in a line with the record's number."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.batch import Padding, collate
from expertmesh.training.data.images import ImageReader
from expertmesh.training.data.pictures import ImageProcessor
from expertmesh.training.data.preview import print_preview, warnings_of
from expertmesh.training.data.record_kinds import SPLIT_TURNS
from expertmesh.training.data.samples import DataOptions, Samples, load_samples
from expertmesh.training.data.sequences import DataOrder, make_rows
from tests.families.configs import tiny_config
from tests.images import FAMILIES, image_config
from tests.pictures import (
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


def check_samples(samples: Samples, records: Sequence[Plain], own: Any, reader: ImageReader) -> None:
    """Tokens and pixels are those of transformers' own processor, each by itself and packed; image tokens are no
    targets."""
    assert reader.processor is not None
    for sample, (messages, images) in zip(samples, records, strict=True):
        text = own.apply_chat_template(messages, tokenize=False)
        wanted = own(text=[text], images=images or None, return_tensors="pt")
        assert sample.tokens == wanted["input_ids"][0].tolist()
        trained = {token for token, is_trained in zip(sample.tokens, sample.is_trained, strict=True) if is_trained}
        assert reader.processor.token not in trained
        batch = collate([[sample]], padding=Padding(images=reader))
        assert (batch.images is None) == (not images)
        for name, value in {} if batch.images is None else batch.images.inputs.items():
            assert torch.equal(value, wanted[name]), name
    packed = collate([list(samples)], padding=Padding(images=reader)).images
    assert packed is not None
    number = len(packed.inputs[reader.facts.inputs[1]])
    assert packed.counts[0] == number == sum(len(images) for _, images in records)


def test_tokens_are_the_processors_and_pixels_too(
    directory: Path, processor: ImageProcessor, load: Any, tmp_path: Path
) -> None:
    data, records = written(tmp_path)
    own, model = theirs(directory), build_model(image_config("qwen3_vl_moe"), images=True)
    reader = ImageReader(model)
    reader.processor = processor
    samples = load(data, train_on="all")
    check_samples(samples, records, own, reader)
    assert samples.lengths.tolist() == [len(sample.tokens) for sample in samples]


@pytest.mark.parametrize("family", tiered(QUICK, [f for f in FAMILIES if f not in QUICK]))
def test_every_familys_processor(family: str, tmp_path: Path) -> None:
    """Its tokens, whatever it writes around an image's, and what it makes of pixels; image tokens are never targets."""
    config = image_config(family)
    if pil_class_of(config) is None:
        pytest.skip(f"the processor of {family} needs torchvision")
    own = save_processor_of(tmp_path / "model", config)
    processor = ImageProcessor(str(tmp_path / "model"), config)
    reader = ImageReader(build_model(config, images=True))
    reader.processor = processor
    data, records = written(tmp_path)
    options = DataOptions(2048, images=processor, train_on="all")
    samples = load_samples("--dataset", [str(data)], AutoTokenizer.from_pretrained(tmp_path / "model"), options, 0)
    check_samples(samples, records, own, reader)


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
    assert first.dataset[0]["images"] == [f"{sample.images[0].digest}:{file}"]
    assert processor.pixels(sample.images[0])["pixel_values"].shape == (8, 1536)
    file.write_bytes(content_of(drawn(70, 40, 1)))
    with pytest.raises(ExpertMeshError, match=r"a.png: is another image than when the data were tokenized"):
        processor.pixels(sample.images[0])
    file.unlink()
    with pytest.raises(ExpertMeshError, match=r"a.png cannot be read: No such file"):
        processor.pixels(sample.images[0])


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
        (asked([{**IMAGE, "path": "text.png"}, TEXT]), "text.png cannot be read: cannot identify image file"),
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
    ],
)
def test_what_is_refused(record: Any, said: str, load: Any, tmp_path: Path) -> None:
    content = content_of(drawn(70, 40, 0))
    (tmp_path / "a.png").write_bytes(content)
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no image")
    data = write_lines(tmp_path / "data.jsonl", [asked("say hello"), record])
    with pytest.raises(ExpertMeshError, match=rf"data.jsonl: line 2:? .*{said}"):
        load(data)


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
        assert is_whole or "1 of 1 record lose images that do not end within" in warnings_of(origin, length)[0]
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


def test_each_answer_has_the_images_before_it(load: Any, tmp_path: Path) -> None:
    url = data_url(drawn(70, 40, 0))
    messages = asked([{**IMAGE, "url": url}])["messages"] + asked([{**IMAGE, "url": url}, TEXT])["messages"]
    data = write_lines(tmp_path / "data.jsonl", [{"messages": messages}])
    assert [len(sample.images) for sample in load(data, kind=SPLIT_TURNS)] == [1, 2]
