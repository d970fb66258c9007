"""Every record is read into one form, or refused with a reason from the closed list; nothing else ever happens."""

import contextlib
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.shapes.record_media import MEDIA_KINDS, EmbeddedBytes, Medium, RecordError, resolve_medium
from dflop.shapes.records import Record, Turn, media_paths, parse_record
from dflop.store import REJECT_REASONS

speakers = st.sampled_from(["human", "gpt", "user", "assistant", "system", "narrator", None, 3])
any_text = st.text(st.characters(), max_size=8)
texts = (
    st.lists(st.sampled_from(["<image>", "<video>", "<audio>", "look", "", " "]), max_size=4).map("".join) | any_text
)
keys = st.sampled_from(
    ["type", "text", "image", "video", "path", "bytes", "from", "value", "role", "content", "url", "data"]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | keys, inner, max_size=3),
    max_leaves=6,
)
embedded = st.fixed_dictionaries({}, optional={"bytes": st.binary() | anything, "path": texts | anything})
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "video", "audio", "image_url", "input_audio"]) | anything},
    optional={"text": texts | anything, "image": embedded | texts, "video": anything, "path": texts, "bytes": anything}
    | {"image_url": texts | st.just("data:;base64,?") | anything, "input_audio": anything},
)


def listed_turns(role_key: str, text_key: str):
    content = texts | anything | st.lists(parts | anything, max_size=3)
    turn = st.fixed_dictionaries({}, optional={role_key: speakers | anything, text_key: content})
    return st.lists(turn | anything, max_size=4) | anything


nearly_records = st.fixed_dictionaries(
    {},
    optional={
        "id": anything,
        "image": texts | st.lists(texts | embedded, max_size=3) | embedded | anything,
        "width": st.integers() | st.lists(st.integers()) | anything,
        "height": st.integers() | st.lists(st.integers()) | anything,
        "images": anything,
        "video": texts | anything,
        "audio": anything,
        "conversations": listed_turns("from", "value"),
        "messages": listed_turns("role", "content"),
        "system": texts | anything,
    },
)


def conversation(question: str, answer: str = "Yes.", **more) -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **more}


def reason_of(raw: object) -> tuple[str, str]:
    with pytest.raises(RecordError) as caught:
        parse_record(raw)
    return caught.value.reason, caught.value.detail


def test_both_forms_of_a_conversation_are_read_alike():
    turns = (Turn("system", "Be brief."), Turn("user", "Hello"), Turn("assistant", "Hi"))
    llava = [("system", "Be brief."), ("human", "Hello"), ("gpt", "Hi")]
    chat = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi")]
    first = parse_record({"conversations": [{"from": role, "value": text} for role, text in llava]})
    second = parse_record({"messages": [{"role": role, "content": text} for role, text in chat]})
    assert first == second == Record(None, (), turns)


def test_media_stand_in_the_order_of_their_placeholders():
    record = parse_record(
        conversation(
            "<video>, <image> and <audio>, then <image>", image=["a.png", "b.png"], video="c.mp4", audio="d.wav"
        )
    )
    assert record.media == (
        Medium("video", "c.mp4"),
        Medium("image", "a.png"),
        Medium("audio", "d.wav"),
        Medium("image", "b.png"),
    )


def test_a_list_under_the_plural_key_is_read_too():
    assert parse_record(conversation("<image><image>", images=["a.png", "b.png"])).media == (
        Medium("image", "a.png"),
        Medium("image", "b.png"),
    )


def test_media_may_lie_in_the_record_itself_as_hugging_face_stores_them():
    question = "<image>" * 5
    images = [b"1", {"bytes": b"2", "path": "2.png"}, {"bytes": b"3", "path": None}, {"bytes": None, "path": "4.png"}]
    media = parse_record(conversation(question, image=[*images, {"path": "5.png"}])).media
    assert [medium.file for medium in media] == [
        EmbeddedBytes("image-0", b"1"),
        EmbeddedBytes("2.png", b"2"),
        EmbeddedBytes("image-2", b"3"),
        "4.png",
        "5.png",
    ]


def test_an_embedded_medium_is_shown_by_its_name_and_never_by_its_bytes():
    medium = EmbeddedBytes("a.png", b"\0\1" * 500)
    assert str(medium) == "a.png"
    assert len(repr(medium)) < 100


def test_the_parts_of_a_message_hold_media_or_leave_them_to_the_record():
    def ask(*content, **more):
        turns = [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "Yes."}]
        return parse_record({"messages": turns, **more})

    named = ask({"type": "image", "image": "a.png"}, {"type": "text", "text": " or "}, {"type": "video", "path": "b"})
    assert named.media == (Medium("image", "a.png"), Medium("video", "b"))
    assert named.turns[0] == Turn("user", "<image> or <video>")
    left = ask({"type": "text", "text": "see "}, {"type": "image"}, {"type": "image"}, images=["a.png", "b.png"])
    assert left.media == (Medium("image", "a.png"), Medium("image", "b.png"))
    assert left.turns[0] == Turn("user", "see <image><image>")
    # As a table has it: every part has all keys, most of them null.
    table = ask({"type": "image", "text": None, "image": {"bytes": b"x", "path": None}, "path": None})
    assert table.media == (Medium("image", EmbeddedBytes("image-0", b"x")),)


def test_parts_in_openais_form_are_read_and_what_they_hold_in_base64_is_decoded():
    parts = [
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "image_url", "image_url": "data:image/png;base64,eA=="},
        {"type": "video_url", "video_url": {"url": "file:///clips/b.mp4"}},
        {"type": "input_audio", "input_audio": {"data": "eXo=", "format": "wav"}},
        {"type": "text", "text": "What is this?"},
    ]
    record = parse_record({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "It."}]})
    assert record.media == (
        Medium("image", "a.png"),
        Medium("image", EmbeddedBytes("image-1", b"x")),
        Medium("video", "/clips/b.mp4"),
        Medium("audio", EmbeddedBytes("audio-0", b"yz")),
    )
    assert record.turns[0].content == "<image><image><video><audio>What is this?"


def test_a_system_text_beside_the_turns_is_their_first_unless_they_have_one():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    assert parse_record({"conversations": turns, "system": "Be kind."}).turns[0] == Turn("system", "Be kind.")
    own = [{"from": "system", "value": "Be brief."}, *turns]
    assert [turn.content for turn in parse_record({"conversations": own, "system": "x"}).turns][:2] == [
        "Be brief.",
        "Hi",
    ]


@pytest.mark.parametrize(
    ("images", "width", "height", "sizes"),
    [
        ("a", 3, 2, [(3, 2)]),
        (["a"], [3], [2], [(3, 2)]),
        (["a", "b"], [3, 5], [2, 4], [(3, 2), (5, 4)]),
        (["a", "b"], [3, 0], [2, 4], [(3, 2), None]),
        (["a", "b"], [3, 5], [2], [None, None]),
        (["a", "b"], 3, 2, [None, None]),
        ("a", 3, None, [None]),
        ("a", "3", "2", [None]),
        ("a", True, True, [None]),
        ("a", -3, 2, [None]),
        ("a", 3.5, 2, [None]),
    ],
)
def test_sizes_are_taken_from_the_record_where_they_are_trusted_and_make_sense(images, width, height, sizes):
    count = len(images) if isinstance(images, list) else 1
    raw = conversation("<image>" * count, image=images, width=width, height=height)
    assert [medium.size for medium in parse_record(raw, trust_sizes=True).media] == sizes
    assert [medium.size for medium in parse_record(raw).media] == [None] * count


@pytest.mark.parametrize("nothing", [None, "", []])
def test_an_empty_media_key_is_a_record_without_media(nothing):
    assert parse_record(conversation("hello", image=nothing)).media == ()


def test_the_image_placeholder_may_stand_for_a_video_as_llava_writes_it():
    record = parse_record(conversation("<image>\nWhat happens?", video="clip.mp4"))
    assert record.media == (Medium("video", "clip.mp4"),)
    assert record.turns[0] == Turn("user", "<video>\nWhat happens?")


@pytest.mark.parametrize(
    ("question", "media"),
    [
        ("<image>", {"image": "a.png", "video": "b.mp4"}),
        ("<image><video>", {"video": "b.mp4"}),
        ("<image><image>", {"video": "b.mp4"}),
        ("<image>", {}),
        ("look", {"image": "a.png"}),
        ("<image>", {"image": ["a.png", "b.png"]}),
        ("<audio>", {"video": "b.mp4"}),
    ],
)
def test_media_and_placeholders_must_match_one_to_one(question, media):
    reason, detail = reason_of(conversation(question, **media))
    assert reason == "placeholder_mismatch"
    assert "in the text" in detail


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (None, "a record is an object, this is null"),
        ([1], "this is a list"),
        ({"id": 1}, "needs `conversations` or `messages`"),
        ({"conversations": "hello"}, "`conversations` must be a list of turns"),
        (True, "this is true or false"),
        (1.5, "this is a number"),
        ({"conversations": ["hello"]}, "`conversations[0]` needs `from` and a text in `value`"),
        ({"messages": [{"role": "user", "content": 3}]}, "needs `role` and a text in `content`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "a part of `content` must have a `type` of text, image",
        ),
        ({"messages": [{"role": "user", "content": ["hello"]}]}, "must have a `type` of text, image, video"),
        ({"messages": [{"role": "user", "content": [{"type": ["image"]}]}]}, "must have a `type`"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "a part of type image holds 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:x;base64,?"}]}]},
            "a part of type image_url is not base64",
        ),
        ({"conversations": [{"from": "human", "value": [{"type": "text", "text": "a"}]}]}, "and a text in `value`"),
        (
            {"conversations": [{"from": "narrator", "value": "Once"}]},
            "`conversations[0]` has the unknown speaker 'narrator'",
        ),
        ({"conversations": [{"from": ["gpt"], "value": "Once"}]}, "unknown speaker ['gpt']"),
        (conversation("<image>", image=3), "`image` holds 3"),
        (conversation("<image>", image=["a.png", None]), "`image` holds None"),
        (conversation("<image>", image={"file": "a.png"}), "it must be a path or a list of paths"),
        (conversation("<image>", image={"bytes": None, "path": None}), "`image` holds None"),
        (conversation("<image>", image=[["a.png"]]), "`image` holds ['a.png']"),
        (conversation("<image>", image={"bytes": ["x" * 999]}), "xxx…; it must be a path"),
        (conversation("half a smile: \ud83d"), "`conversations[0]` holds half a surrogate pair"),
        (
            conversation("<image>", image="a.png", images=["b.png"]),
            "`image` and `images` give different media; keep one",
        ),
        (conversation("<image>", image="a.png", images=[3]), "`images` holds 3"),
        (conversation("<image>", image="\ud83d.png"), "`image` holds '\\ud83d.png'"),
    ],
)
def test_a_record_of_another_form_says_what_is_wrong(raw, complaint):
    reason, detail = reason_of(raw)
    assert reason == "bad_record"
    assert complaint in detail


@pytest.mark.parametrize("image", ["a.png", ["a.png"], [], "", None])
def test_media_that_are_given_twice_count_once(image):
    assert parse_record(conversation("<image>", image=image, images=["a.png"])).media == (Medium("image", "a.png"),)


def test_media_in_the_messages_may_not_differ_from_those_beside_them():
    messages = [
        {"role": "user", "content": [{"type": "image", "path": "a.png"}]},
        {"role": "assistant", "content": "Blue."},
    ]
    assert len(parse_record({"messages": messages, "images": ["a.png"]}).media) == 1
    detail = reason_of({"messages": messages, "images": ["b.png"]})[1]
    assert detail == "the parts of `messages` and `images` give different media; keep one of them"


def test_turns_are_taken_from_where_there_are_any():
    turns = conversation("hello")["conversations"]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi."}]
    assert len(parse_record({"conversations": [], "messages": messages}).turns) == 2
    assert len(parse_record({"conversations": turns, "messages": []}).turns) == 2
    assert reason_of({"conversations": [], "messages": []})[0] == "empty"


@pytest.mark.parametrize("answer", ["", "  \n"])
def test_a_record_without_an_answer_is_empty(answer):
    assert reason_of(conversation("hello", answer))[0] == "empty"
    assert reason_of({"messages": []})[0] == "empty"


@pytest.mark.parametrize(
    ("given_id", "sample_id"), [("a", "a"), (7, "7"), (None, None), (0, "0"), ("\ud83d!", "\\ud83d!~a21fe1e2587c5dee")]
)
def test_an_id_becomes_text(given_id, sample_id):
    assert parse_record(conversation("hello", id=given_id)).sample_id == sample_id


@settings(max_examples=400)
@given(raw=nearly_records | anything, trust_sizes=st.booleans())
@example(raw=conversation("<image>" * 3, images=["a"] * 3), trust_sizes=True)
@example(raw=conversation("<image>", image="a", width=2, height=1), trust_sizes=True)
@example(raw=conversation("<image>", image={"bytes": b"x", "path": "\ud83d"}), trust_sizes=False)
def test_whatever_a_manifest_holds_is_a_record_or_a_record_error(raw, trust_sizes):
    try:
        record = parse_record(raw, trust_sizes=trust_sizes)
    except RecordError as error:
        refused = error
    else:
        refused = None
    if refused:
        assert refused.reason in REJECT_REASONS
        refused.detail.encode()
        assert media_paths(raw) == []
        return
    assert media_paths(raw) == [medium.file for medium in record.media if isinstance(medium.file, str)]
    text = "".join(turn.content for turn in record.turns)
    for kind in MEDIA_KINDS:
        assert text.count(f"<{kind}>") == sum(medium.kind == kind for medium in record.media)
    assert any(turn.role == "assistant" and turn.content.strip() for turn in record.turns)
    for part in (record.sample_id or "", text, *(str(medium.file) for medium in record.media)):
        part.encode()
    for medium in record.media:
        assert medium.size is None or (trust_sizes and medium.kind == "image" and min(medium.size) > 0)


def resolved(root, path):
    return resolve_medium(root, Medium("image", path))


def test_a_medium_is_found_below_its_root(tmp_path):
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "a.png"
    file.write_bytes(b"x")
    assert resolved(tmp_path, "deep/a.png") == resolved(tmp_path, "deep/../deep/./a.png") == file.resolve()
    assert resolved(tmp_path, str(file)) == file.resolve()


def test_a_root_that_is_a_link_is_still_the_root(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(b"x")
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert resolved(tmp_path / "root", "a.png") == (tmp_path / "real" / "a.png").resolve()


@pytest.mark.parametrize(
    "path", ["../secret.png", "/etc/passwd", "in/../../secret.png", "link.png", "folder/secret.png"]
)
def test_a_path_that_leaves_the_root_is_refused_even_through_a_link(tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "folder").symlink_to(tmp_path)
    with pytest.raises(RecordError) as caught:
        resolved(root, path)
    assert caught.value.reason == "path_escape"
    assert path in caught.value.detail


@pytest.mark.parametrize(
    "path", ["none.png", "folder", "", "a" * 300, "nul\0.png", "circle", "circle/a.png", "file/a.png"]
)
def test_a_path_that_is_no_file_is_missing(tmp_path, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(RecordError) as caught:
        resolved(tmp_path, path)
    assert caught.value.reason == "missing_media"


@given(path=any_text | st.text("./a~\0", max_size=9))
def test_no_path_leads_anywhere_but_into_the_root(tmp_path_factory, path):
    root = tmp_path_factory.getbasetemp() / "root"
    root.mkdir(exist_ok=True)
    (root / "a").touch()
    found = root / "a"
    with contextlib.suppress(RecordError):
        found = resolved(root, path)
    assert os.path.samefile(found, root / "a")


TO_THE_TERMINAL = "\x1b]52;c;cm0=\x07 \x1b[2J\rok \x9b31m \u202e"


def test_what_could_steer_a_terminal_is_escaped_wherever_it_comes_from(profile_records, tmp_path):
    speaker = {"conversations": [{"from": TO_THE_TERMINAL, "value": "?"}]}
    missing = conversation("<image>", image=f"{TO_THE_TERMINAL}.jpg")
    frame = profile_records([{"id": TO_THE_TERMINAL, **record} for record in (speaker, missing)], tmp_path)
    for text in (*frame["sample_id"], *frame["detail"], str(UserError(f"{TO_THE_TERMINAL}\n{TO_THE_TERMINAL}"))):
        assert "x1b]52;c;cm0=" in text
        assert text.replace("\n", "").isprintable()
    assert str(UserError("two\nlines, é雪👍")) == "two\nlines, é雪👍"


def test_an_id_and_another_records_id_that_is_its_escapes_are_two(profile_records, tmp_path):
    ids = ["\x1b", "\\x1b", "a\r", "a\\r", "\ud800", "\\ud800", "é"]
    frame = profile_records([{"id": given, **conversation("Hello")} for given in ids], tmp_path)
    assert len({*frame["sample_id"]}) == len(ids)
    assert frame["sample_id"].to_list()[1::2] == ids[1::2]
    assert frame["sample_id"][6] == "é"


def test_a_detail_is_no_longer_than_a_console_bears():
    assert len(RecordError("bad_record", "x" * 1_000_000).detail) == 1000
