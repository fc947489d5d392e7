"""The endpoint over a socket, asked by the real OpenAI client: answers, streams, hang-ups, and what is wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from kvweave.cli.api_command import BytesCodec  # noqa: E402
from kvweave.cli.run.text import ByteTokenizer  # noqa: E402
from kvweave.engine import Engine  # noqa: E402
from kvweave.engine.api.answer_text import AnswerText  # noqa: E402
from kvweave.engine.api.endpoint import Endpoint  # noqa: E402
from kvweave.engine.api.formats import ChatFormat, CompletionFormat  # noqa: E402
from kvweave.engine.api.prompt_codec import TokenizerCodec, ToolCall, ToolCalls  # noqa: E402
from kvweave.engine.api.request_fields import ONLY, WITHOUT_EFFECT  # noqa: E402
from kvweave.errors import NeverFits  # noqa: E402
from tests.integrations.models import plain  # noqa: E402

KEY = "a-key"
CODEC = BytesCodec(ByteTokenizer())
TEXT = "Once upon a time, in a land of pages"


def byte_model() -> Any:
    """A small Llama whose tokens are bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=259, max_position_embeddings=2048, eos_token_id=None
    )
    return LlamaForCausalLM(config).eval()


def byte_engine() -> Engine:
    return Engine(byte_model(), "8MiB", rows=32, max_tokens=2048, budget=64)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return byte_engine()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with served(engine, CODEC) as url:
        yield url


@contextmanager
def served(engine: Engine, codec: BytesCodec) -> Iterator[str]:
    """The address of an endpoint, at whose end the engine is closed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = Endpoint(engine, codec, "tiny", KEY).app()
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
    assert not engine.is_running, "the engine outlived its endpoint"


@pytest.fixture
def client(url: str) -> Any:
    return client_of(url)


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def expected(engine: Engine, prompt: list[int], count: int) -> str:
    with engine.weave.memory.core_lock:
        answer = plain(engine.model, torch.tensor([prompt]), num_tokens=count, eos_token_id=None)
    return ByteTokenizer().decode(answer.sequences[0, len(prompt) :].tolist())


def is_quiet(engine: Engine) -> bool:
    for _ in range(500):
        stats = engine.stats()
        if not stats.running and not stats.waiting and not stats.core.sequences:
            return True
        time.sleep(0.01)
    return False


def test_a_completion_is_that_of_transformers(client: Any, engine: Engine) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, temperature=0)
    assert answer.choices[0].text == expected(engine, CODEC.encode(TEXT), 9)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(TEXT), 9)
    again = client.completions.create(model="tiny", prompt=CODEC.encode(TEXT), max_tokens=9, temperature=0)
    assert again.choices[0].text == answer.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_a_chat_goes_through_the_template(client: Any, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": [{"type": "text", "text": "you"}]}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=7, temperature=0)
    prompt = ByteTokenizer().chat([("user", "hello"), ("user", "you")])
    assert answer.choices[0].message.content == expected(engine, prompt, 7)
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_gives_the_same_text_in_pieces(client: Any, count: int) -> None:
    options = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 1.0, "seed": 5, "n": count}
    whole = client.completions.create(**options)
    texts, reasons, usage = [""] * count, {}, None
    for event in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert set(reasons.values()) == {"length"}
    assert usage is not None
    assert usage.completion_tokens == 12 * count
    assert len(set(texts)) == count, "choices have seeds of their own"


def test_a_chat_streams_its_role_first(client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    events = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices[0].finish_reason == "length"


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"day": {"type": "integer"}}}}}]


TOLD, OPENED = CODEC.encode("[look]"), CODEC.encode("<call>")


class CallingCodec(BytesCodec):
    """Takes every answer of seven tokens for two calls. Tools, and the opening of a call, are told in brackets."""

    reads_tool_calls = True
    call_opening = "<call>"

    def chat(self, messages: Any, tools: Any, opens_call: bool) -> list[int]:
        told = TOLD if tools else []
        return [*super().chat(messages, tools, opens_call), *told, *(OPENED if opens_call else [])]

    def tool_calls(self, prompt: Any, answer: Any, tools: Any) -> Any:
        assert tools == TOOLS
        assert list(prompt) in ([*HELLO, *TOLD], [*HELLO, *TOLD, *OPENED])
        calls = ToolCall("look", '{"day": 3}'), ToolCall("look", '{"day": 4}')
        return ToolCalls(None, calls) if len(answer) == 7 else None


HELLO = ByteTokenizer().chat([("user", "hello")])


@pytest.fixture
def ask() -> Iterator[Any]:
    with served(byte_engine(), CallingCodec(ByteTokenizer())) as url:
        yield partial(client_of(url).chat.completions.create, model="tiny", temperature=0, tools=TOOLS)


def test_calls_of_tools_are_told_apart_from_text(ask: Any, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    choice = ask(messages=messages, max_tokens=7).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    call, _ = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "look", {"day": 3})
    streamed = [event.choices[0] for event in ask(messages=messages, max_tokens=7, stream=True)]
    _, call = streamed[-1].delta.tool_calls
    assert (call.index, call.function.name, streamed[-1].finish_reason) == (1, "look", "tool_calls")
    text = expected(engine, [*HELLO, *TOLD], 6)
    assert ask(messages=messages, max_tokens=6).choices[0].message.content == text
    (call,) = ask(messages=messages, max_tokens=7, parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"day": 3}


def test_no_tool_is_shown_to_a_model_that_is_to_call_none(ask: Any, engine: Engine) -> None:
    choice = ask(messages=[{"role": "user", "content": "hello"}], max_tokens=7, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (expected(engine, HELLO, 7), None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=str)
def test_a_call_that_is_required_is_opened_for_the_model_and_its_absence_is_an_error(ask: Any, choice: Any) -> None:
    options: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "tool_choice": choice}
    answer = ask(**options, max_tokens=7)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.prompt_tokens == len([*HELLO, *TOLD, *OPENED])
    with pytest.raises(openai.InternalServerError, match="wrote no such call in 6 tokens"):
        ask(**options, max_tokens=6)
    with pytest.raises(openai.APIError, match="wrote no such call"):
        list(ask(**options, max_tokens=6, stream=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, "none of the tools"),
        ({"tool_choice": "required", "tools": []}, "none of the tools"),
        ({"tool_choice": "always"}, "tool_choice is"),
        ({"tools": [{"name": "look"}]}, "tools is a list"),
    ],
    ids=str,
)
def test_choices_of_tools_that_make_no_sense_are_refused(ask: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        ask(messages=[{"role": "user", "content": "hello"}], **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "takes no tools"),
        ({"tool_choice": "required"}, "does not say how a call opens"),
        ({"parallel_tool_calls": False}, "no response_template"),
    ],
    ids=str,
)
def test_tools_that_the_model_would_not_see_are_refused(client: Any, options: dict[str, Any], why: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match=why):
        client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, **options)


def test_a_tokenizer_with_a_response_template_reads_its_calls() -> None:
    words = ["<call>", "</call>", '{"name": "look", "arguments": {"day": 3}}', "Well.", "<assistant>", "?"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="?")))
    codec = TokenizerCodec(tokenizer)
    assert not codec.reads_tool_calls
    call = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
    call["transform"] = {"type": "function", "function": "{content}"}
    fields = {"tool_calls": call, "content": {}}
    tokenizer.response_template = {"start_anchor": "<assistant>", "defaults": {"role": "assistant"}, "fields": fields}
    assert codec.reads_tool_calls
    assert codec.call_opening == "<call>"
    assert codec.tool_calls([4, 0], [2, 1], TOOLS) == ToolCalls(None, (ToolCall("look", '{"day": 3}'),)), (
        "opened before"
    )
    assert codec.tool_calls([4], [3, 0, 2, 1], TOOLS) == ToolCalls("Well.", (ToolCall("look", '{"day": 3}'),))
    assert codec.tool_calls([4], [3], TOOLS) is None
    assert codec.tool_calls([4], [0, 3, 1], TOOLS) is None, "a call that is no JSON"


def test_stop_strings_end_an_answer_and_are_not_part_of_it(client: Any) -> None:
    options = {"model": "tiny", "prompt": TEXT, "max_tokens": 40, "temperature": 1.0, "seed": 3}
    text = client.completions.create(**options).choices[0].text
    stop = next(text[at : at + 2] for at in range(5, len(text)) if text[at : at + 2].isascii())
    answer = client.completions.create(**options, stop=[stop, "never"]).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    pieces = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in pieces) == answer.text


def test_logprobs_are_those_of_the_model(client: Any, engine: Engine) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=3, temperature=0, logprobs=2)
    logs = answer.choices[0].logprobs
    with engine.weave.memory.core_lock, torch.no_grad():
        own = engine.model(torch.tensor([CODEC.encode(TEXT)])).logits[0, -1].log_softmax(-1)
    assert logs.token_logprobs[0] == pytest.approx(float(own.max()), abs=1e-4)
    assert len(logs.tokens) == 3
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert [len(each.top_logprobs) for each in chat.choices[0].logprobs.content] == [3] * 4


def test_many_clients_at_once_each_get_their_own_answer(client: Any, engine: Engine) -> None:
    prompts = [f"{TEXT} number {number}" for number in range(12)]
    wanted = [expected(engine, CODEC.encode(prompt), 6) for prompt in prompts]

    def ask(prompt: str) -> str:
        return str(client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0).choices[0].text)

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == wanted
    assert is_quiet(engine)


def test_a_client_that_hangs_up_amid_its_body_is_no_failure_of_the_server(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sent:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
        sent.sendall(head.encode() + b'{"prompt":')
        time.sleep(0.2)
    assert raw(url, "/health")[0] == 200
    time.sleep(0.2)
    assert "ClientDisconnect" not in caplog.text


def test_clients_that_hang_up_leave_nothing_behind(
    url: str, client: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.completions.create(model="tiny", prompt=TEXT, max_tokens=1900, stream=True)
    next(iter(stream))
    stream.close()
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": TEXT, "max_tokens": 1900})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall((head + body).encode())
        time.sleep(0.1)
    assert is_quiet(engine)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "x"}, {"max_tokens": 0}, {"temperature": -1}, {"top_p": 2.5}, {"n": 0}, {"n": 1000},
        {"stop": [""]}, {"prompt": []}, {"prompt": [[-4]]}, {"prompt": 7}, {"logprobs": 50}, {"echo": True},
        {"prompt": "x" * 3000}, {"max_tokens": 5000}, {"suffix": "x"}, {"best_of": 3}, {"logit_bias": {"a": 1}},
        {"logit_bias": {"999": 1}}, {"logit_bias": {"5": 101}}, {"frequency_penalty": 3},
        {"stream": True, "stream_options": {"include_obfuscation": True}}, {"extra_body": {"temprature": 1}},
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_runs(client: Any, engine: Engine, wrong: dict[str, Any]) -> None:
    before = engine.stats().requests
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(**{"model": "tiny", "prompt": TEXT, **wrong})
    assert told.value.body["message"]
    assert engine.stats().requests == before


CHAT_ONLY = {
    "response_format": {"type": "json_object"}, "modalities": ["text", "audio"], "store": True, "service_tier": "flex",
    "functions": [{"name": "look"}], "function_call": "auto", "audio": {"voice": "x", "format": "wav"},
    "web_search_options": {}, "reasoning_effort": "low", "verbosity": "low", "top_logprobs": 3,
    "max_completion_tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", CHAT_ONLY)
def test_fields_of_a_chat_that_would_be_ignored_are_refused_by_name(client: Any, name: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(model="tiny", messages=messages, **{name: CHAT_ONLY[name]})


def test_every_field_of_the_openai_client_is_served_or_known_to_be_none_of_this_server() -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    for shape, params in ((CompletionFormat, completion_create_params), (ChatFormat, chat_params)):
        asked = set(params.CompletionCreateParamsBase.__annotations__)
        assert not asked - shape.fields - set(WITHOUT_EFFECT) - set(ONLY)


def test_fields_that_change_no_answer_are_taken(client: Any) -> None:
    harmless: dict[str, Any] = {
        "user": "me", "safety_identifier": "x", "metadata": {"a": "b"}, "prompt_cache_key": "k",
        "response_format": {"type": "text"}, "modalities": ["text"], "store": False, "service_tier": "auto",
        "tool_choice": "auto", "parallel_tool_calls": True,
    }  # fmt: skip
    messages = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 4, "temperature": 0}
    ask = client.chat.completions.create
    assert ask(**options, **harmless).choices[0].message.content == ask(**options).choices[0].message.content
    completed = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=2, n=2, best_of=2, echo=False, suffix=""
    )
    assert len(completed.choices) == 2


def test_biases_and_penalties_change_the_tokens_that_they_are_for(client: Any) -> None:
    q = str(CODEC.encode("q")[0])
    options = {"model": "tiny", "prompt": TEXT, "max_tokens": 6, "temperature": 0}
    forced = client.completions.create(**options, logit_bias={q: 100}).choices[0].text
    assert forced == "qqqqqq"
    penalised = client.completions.create(**options, logit_bias={q: 1.5}, frequency_penalty=2.0)
    assert penalised.choices[0].text.count("q") < 2
    same = client.completions.create(**options, presence_penalty=0, frequency_penalty=0).choices[0].text
    assert same == client.completions.create(**options).choices[0].text


def test_bodies_that_are_no_json_or_no_object(url: str) -> None:
    import urllib.error
    import urllib.request

    for body in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
        with pytest.raises(urllib.error.HTTPError) as told:
            urllib.request.urlopen(asked)
        assert told.value.code == 400


def test_keys_models_health_and_metrics(url: str, client: Any) -> None:
    import urllib.request

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0).models.list()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvweave"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="huge", prompt=TEXT)
    assert json.load(urllib.request.urlopen(f"{url}/health")) == {"status": "ok"}
    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    metrics = urllib.request.urlopen(asked).read().decode()
    assert "# TYPE kvweave_engine_new_tokens_total counter" in metrics
    assert 'kvweave_engine_pages_held{group="' in metrics


def test_text_waits_for_whole_characters_and_for_stop_strings() -> None:
    text = AnswerText(CODEC, ["stop"])
    shown = [text.add(token) for token in CODEC.encode("aüstob")]
    assert shown == ["a", "", "ü", "", "", "", "stob"]
    assert text.offsets == [0, 1, 1, 2, 3, 4, 5]
    assert text.end() == ""
    text = AnswerText(CODEC, ["stop"])
    assert "".join(text.add(token) for token in CODEC.encode("x sto")) == "x "
    assert text.end() == "sto"
    text = AnswerText(CODEC, ["stop"])
    assert "".join(text.add(token) for token in CODEC.encode("x stop")) == "x "
    assert text.is_stopped


def raw(url: str, path: str, body: bytes | None = None, method: str | None = None) -> tuple[int, Any]:
    """The status and the JSON of an answer, asked for without a client that checks anything."""
    import urllib.error
    import urllib.request

    asked = urllib.request.Request(f"{url}{path}", body, {"Authorization": f"Bearer {KEY}"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 10**400}, {"top_p": -(10**400)}, {"logit_bias": {"5": 10**400}}, {"prompt": "\ud800"},
        {"prompt": ["a", "\ud800"]}, {"\ud800": 1}, {"prompt": [True]}, {"repetition_penalty": 10**400},
    ],
    ids=repr,
)  # fmt: skip
def test_what_no_number_or_text_can_hold_is_refused(url: str, wrong: dict[str, Any]) -> None:
    status, answer = raw(url, "/v1/completions", json.dumps({"prompt": TEXT, **wrong}).encode())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_an_error_does_not_repeat_a_whole_body(url: str) -> None:
    for wrong in ({"audio": "x" * 10**6}, {"y" * 10**6: 1}, {"model": "z" * 10**6}):
        status, answer = raw(url, "/v1/completions", json.dumps({"prompt": TEXT, **wrong}).encode())
        assert status in (400, 404)
        assert len(answer["error"]["message"]) < 1100


def test_numbers_at_the_edge_are_served_and_keep_no_other_from_its_answer(url: str, engine: Engine) -> None:
    for edge in ({"top_k": 10**400}, {"temperature": 1e-45}, {"seed": -(10**40)}, {"priority": 10**40}):
        body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0.5, **edge}
        assert raw(url, "/v1/completions", json.dumps(body).encode())[0] == 200
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": 1e-300}
    _, answer = raw(url, "/v1/completions", json.dumps(body).encode())
    assert answer["choices"][0]["text"] == expected(engine, CODEC.encode(TEXT), 5), "nearly greedy"


def test_unknown_paths_and_methods_are_told_as_openai_tells_errors(url: str) -> None:
    for path, method, status in (("/v1/embeddings", "POST", 404), ("/v1/completions", "GET", 405)):
        found, answer = raw(url, path, b"{}" if method == "POST" else None, method)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
        assert path in answer["error"]["message"]


@pytest.mark.parametrize("stop", [None, "some"], ids=["to its length", "to a stop string"])
def test_logprobs_and_offsets_of_a_stream_are_those_of_the_whole_answer(client: Any, stop: str | None) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 60, "temperature": 1.0, "seed": 3}
    whole = client.completions.create(**options, logprobs=2)
    if stop:
        text = whole.choices[0].text
        options["stop"] = next(text[at : at + 2] for at in range(5, len(text)) if text[at : at + 2].isascii())
        whole = client.completions.create(**options, logprobs=2)
    choice = whole.choices[0]
    logs = choice.logprobs
    assert len(logs.tokens) == len(logs.token_logprobs) == len(logs.text_offset) == whole.usage.completion_tokens
    assert (whole.usage.completion_tokens < 60) == bool(stop), "tokens behind a stop string do not count"
    assert [0, *logs.text_offset] == sorted([0, *logs.text_offset])
    assert logs.text_offset[-1] <= len(choice.text) + 2
    events = list(client.completions.create(**options, logprobs=2, stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].logprobs for event in events if event.choices and event.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.tokens] == logs.tokens
    assert [log for piece in pieces for log in piece.token_logprobs] == logs.token_logprobs
    assert [at for piece in pieces for at in piece.text_offset] == logs.text_offset
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_bytes_of_tokens_add_up_to_the_text(client: Any) -> None:
    """Also where a token is a part of a character."""
    bias = {str(each): 100 for each in CODEC.encode("é")}
    messages = [{"role": "user", "content": "hi"}]
    choice = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=30, logprobs=True, seed=1, logit_bias=bias
    ).choices[0]
    found = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert set(found) == set("é".encode())
    assert found.decode(errors="replace") == choice.message.content


def test_a_tokenizer_tells_the_bytes_of_tokens_that_are_no_characters() -> None:
    from tokenizers import decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    levels = Tokenizer(BPE({character: number for number, character in enumerate(sorted(alphabet))}, []))
    levels.pre_tokenizer, levels.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    codec = TokenizerCodec(PreTrainedTokenizerFast(tokenizer_object=levels))
    text = "Grüße, 世界 🙂\n"
    assert b"".join(codec.token_bytes(token) or b"?" for token in codec.encode(text)) == text.encode()
    vocabulary = {"a": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    fallback = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    codec = TokenizerCodec(PreTrainedTokenizerFast(tokenizer_object=fallback))
    assert b"".join(codec.token_bytes(token) or b"?" for token in codec.encode("a🙂")) == "a🙂".encode()
    shown = AnswerText(codec)
    assert "".join(map(shown.add, codec.encode("a🙂ü"))) + shown.end() == "a🙂ü"


def test_prompts_that_are_the_same_count_each_and_choices_of_one_count_once(client: Any) -> None:
    for prompts, choices in (([TEXT, TEXT], 1), ([TEXT], 3), ([TEXT, "other", TEXT], 2)):
        usage = client.completions.create(model="tiny", prompt=prompts, n=choices, max_tokens=2).usage
        assert usage.prompt_tokens == sum(len(CODEC.encode(each)) for each in prompts)
        assert usage.completion_tokens == 2 * choices * len(prompts)
        assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_a_stop_cuts_short_are_errors(stream: bool) -> None:
    engine = byte_engine()
    with served(engine, CODEC) as url:
        ask = partial(client_of(url).completions.create, model="tiny", prompt=TEXT)
        threading.Timer(0.3, engine.close).start()
        with pytest.raises(openai.APIError, match="stopped before the answer ended"):
            list(ask(max_tokens=2000, stream=stream))
        with pytest.raises(openai.InternalServerError, match="closed") as told:
            ask()
        assert told.value.status_code == 503


def test_a_stream_that_never_began_leaves_no_request_behind(engine: Engine) -> None:
    """The client is gone before its stream begins."""
    body = json.dumps({"prompt": TEXT, "max_tokens": 1900, "stream": True}).encode()
    news = iter([{"type": "http.request", "body": body, "more_body": False}])
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    sent = []

    async def receive() -> Any:
        return next(news, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.sleep(0)  # as a server whose buffers are full

    app = Endpoint(engine, CODEC, "tiny", KEY).app()
    before = engine.stats().new_tokens
    asyncio.run(app({**scope, "asgi": {"spec_version": "2.3"}}, receive, send))
    assert is_quiet(engine)
    assert engine.stats().new_tokens - before < 1900


def test_a_model_without_a_last_position_answers_at_any_length(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(engine, CODEC, "tiny", KEY)
    assert endpoint._limit([5] * 10, None) == 1024
    assert endpoint._limit([5] * 2000, None) == 48
    monkeypatch.setattr(endpoint, "max_tokens", None)
    assert endpoint._limit([5] * 10, 5000) == 5000


def test_an_answer_of_no_given_length_is_no_longer_than_memory_has_pages_for() -> None:
    with Engine(byte_model(), "256KiB", rows=8, max_tokens=2048, budget=64) as engine:
        endpoint = Endpoint(engine, CODEC, "tiny", KEY)
        limit = endpoint._limit([5] * 100, None)
        engine.check_fits(100, limit)
        with pytest.raises(NeverFits):
            engine.check_fits(100, 1024)
        assert limit > 1


def test_a_second_signal_ends_answers_under_way() -> None:
    import signal

    from kvweave.engine.api.serve_api import _Server

    is_ended = threading.Event()
    server = _Server(uvicorn.Config(Endpoint.app), is_ended.set)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert not is_ended.wait(0.1)
    server.handle_exit(signal.SIGTERM, None)
    assert is_ended.wait(30)
    assert not server.force_exit, "the engine is closed in order"


def test_answers_that_take_too_long_after_a_signal_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from kvweave.engine.api import serve_api

    monkeypatch.setattr(serve_api, "GRACE_S", 0.05)
    is_ended = threading.Event()
    server = serve_api._Server(uvicorn.Config(Endpoint.app), is_ended.set)
    server.handle_exit(signal.SIGTERM, None)
    assert is_ended.wait(30)
