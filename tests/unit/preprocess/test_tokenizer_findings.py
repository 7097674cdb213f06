"""What the first load of a tokenizer found out is used by later ones, which need one library only."""

import pathlib

import pytest

from dynamo.preprocess import tokenize, tokenizer_library


@pytest.fixture
def options(tmp_path) -> tokenize.TokenizerOptions:
    return tokenize.TokenizerOptions(findings=tokenizer_library.FindingsDirectory(tmp_path / "new"))


def describe(tokenizer: tokenize.Tokenizer) -> tuple[object, ...]:
    """Return what could differ between two loads."""
    cutter = tokenizer._cutter
    return (
        type(tokenizer.backend),
        [tokenizer.token_of(token_id) for token_id in range(tokenizer.num_ids)],
        tokenizer.special_ids,
        cutter and (cutter.tokens, cutter.at_lines),
        tokenizer.encode_now(["A brave cat<|im_end|>\n你好"], add_special_tokens=True),
    )


@pytest.mark.parametrize("name", ["byte_level_json", "sentencepiece_json"])
def test_second_load_equals_the_first(request, options, name):
    definition = request.getfixturevalue(name).encode()
    first = tokenize.Tokenizer(definition, options)

    assert describe(tokenize.Tokenizer(definition, options)) == describe(first)


def test_second_load_does_without_the_reference(byte_level_json, options, monkeypatch):
    tokenize.Tokenizer(byte_level_json.encode(), options)
    monkeypatch.delattr(tokenizer_library, "HuggingFaceLibrary")

    tokenize.Tokenizer(byte_level_json.encode(), options)


def test_second_load_does_not_try_a_library_that_differed(byte_level_json, options, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_library.FastokensLibrary, "decode", lambda *_, **__: "wrong")
        tokenize.Tokenizer(byte_level_json.encode(), options)
    ours = tokenize.Tokenizer(byte_level_json.encode(), options)

    assert isinstance(ours.backend, tokenizer_library.HuggingFaceLibrary)


def test_vocabulary_that_is_read_otherwise_is_a_difference(byte_level_json, options, monkeypatch):
    read = tokenizer_library.read_vocabulary
    monkeypatch.setattr(
        tokenizer_library,
        "read_vocabulary",
        lambda text: tokenizer_library.Vocabulary(read(text).tokens[1:], read(text).added),
    )
    ours = tokenize.Tokenizer(byte_level_json.encode(), options)

    assert isinstance(ours.backend, tokenizer_library.HuggingFaceLibrary)


def test_other_definition_is_checked_anew(byte_level_json, options):
    tokenize.Tokenizer(byte_level_json.encode(), options)

    assert options.findings.find(f"{byte_level_json} ".encode()) is None


def test_other_version_of_a_library_is_checked_anew(byte_level_json, options, monkeypatch):
    tokenize.Tokenizer(byte_level_json.encode(), options)
    monkeypatch.setattr(tokenizer_library, "_versions", lambda: b"others")

    assert options.findings.find(byte_level_json.encode()) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_damaged_findings_are_written_anew(byte_level_json, options, tmp_path, content):
    definition = byte_level_json.encode()
    tokenize.Tokenizer(definition, options)
    (file,) = (tmp_path / "new").iterdir()
    file.write_bytes(content)
    tokenize.Tokenizer(definition, options)

    assert options.findings.find(definition) is not None


def test_load_succeeds_where_nothing_can_be_kept(byte_level_json, tmp_path):
    (tmp_path / "file").write_text("")
    directory = tokenizer_library.FindingsDirectory(tmp_path / "file")
    options = tokenize.TokenizerOptions(findings=directory)

    assert tokenize.Tokenizer(byte_level_json.encode(), options).num_ids > 0


def test_prompts_are_not_cut_without_a_cache_whatever_was_found(byte_level_json, options):
    tokenize.Tokenizer(byte_level_json.encode(), options)
    ours = tokenize.Tokenizer(
        byte_level_json.encode(),
        tokenize.TokenizerOptions(cache_bytes=0, findings=options.findings),
    )

    assert ours._cutter is None


def test_directory_of_the_user_is_in_the_cache(byte_level_json, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = tokenize.TokenizerOptions(findings=tokenizer_library.FindingsDirectory.of_user())
    tokenize.Tokenizer(byte_level_json.encode(), options)

    assert len(list((tmp_path / "pydynamo" / "tokenizers").iterdir())) == 1


def test_user_without_a_home_has_no_directory(monkeypatch):
    def fail(_path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pathlib.Path, "expanduser", fail)

    assert tokenizer_library.FindingsDirectory.of_user() is None
