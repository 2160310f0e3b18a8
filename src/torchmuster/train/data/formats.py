"""Records as token ids and labels: text, token ids, chats, and prompts with completions."""

import json
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import msgspec

from torchmuster.decision import Decision
from torchmuster.errors import Impossible, MusterError, first_line
from torchmuster.train.losses import IGNORED

if TYPE_CHECKING:
    from torchmuster.train.data.tokenizers import Tokenizer

Kind: TypeAlias = Literal["text", "chat", "prompt_completion", "tokens"]
# Each sample of these kinds is kept whole: it is truncated, and never continues in another row.
WHOLE: tuple[Kind, ...] = ("chat", "prompt_completion")
# The field names of the ShareGPT format, which many datasets still use.
_CONVERSATIONS = "conversations"
_ROLES = {"human": "user", "gpt": "assistant"}
# transformers can tell the answers of a template with this tag.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokens(NamedTuple):
    """A document as token ids, with its end token."""

    ids: Sequence[int]
    labels: Sequence[int] | None = None  # None: every token is a target


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """What a record holds, and in which fields."""

    kind: Kind = "text"
    text_field: str = "text"
    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"

    def recognize(self, record: Mapping[str, Any], named: Collection[str] = ()) -> Decision[Kind]:
        """Return the kind that a record has by its fields; fields that the user ``named`` decide first."""
        if "text" in named:
            return Decision(value="text", reason=f"data.columns names {self.text_field}")
        if record.get("input_ids") is not None:
            return Decision(value="tokens", reason="the first record has input_ids")
        for field in (self.messages_field, _CONVERSATIONS):
            if _is_chat(record.get(field)):
                return Decision(value="chat", reason=f"the first record has messages in {field}")
        if self.prompt_field in record and self.completion_field in record:
            fields = f"{self.prompt_field} and {self.completion_field}"
            return Decision(value="prompt_completion", reason=f"the first record has {fields}")
        return Decision(value="text", reason=f"the field {self.text_field} holds the text")


class RecordTokenizer:
    """Converts records to documents, in the process that reads them."""

    def __init__(self, how: RecordFormat, tokenizer: "Tokenizer") -> None:
        self.how = how
        self._tokenizer = tokenizer
        self._chat = _ChatTemplate(tokenizer) if how.kind == "chat" else None

    def documents(self, records: Sequence[Mapping[str, Any]]) -> list[Tokens | MusterError]:
        """Return the document of each record, or its error; many are fastest together.

        An empty text gives an empty document.
        """
        documents: list[Tokens | MusterError] = []
        texts: dict[int, str] = {}
        for record in records:
            content: Tokens | MusterError | str
            try:
                content = self._content(record)
            except Impossible:
                raise
            except MusterError as error:
                content = error
            if isinstance(content, str):
                if content:
                    texts[len(documents)] = content
                content = Tokens([])
            documents.append(content)
        if texts:
            encoded = self._tokenizer.encode(list(texts.values()))
            for place, ids in zip(texts, encoded, strict=True):
                documents[place] = Tokens([*ids, self._tokenizer.end])
        return documents

    def _content(self, record: Mapping[str, Any]) -> Tokens | str:
        if self._chat is not None:
            return self._conversation(record, self._chat)
        if self.how.kind == "prompt_completion":
            return self._completion(record)
        return self._text_or_tokens(record)

    def _conversation(self, record: Mapping[str, Any], template: "_ChatTemplate") -> Tokens:
        field = self.how.messages_field
        if field not in record and _CONVERSATIONS in record:
            field = _CONVERSATIONS
        messages = _messages(_field(record, field), field)
        return template.tokens(messages, _tools(record))

    def _completion(self, record: Mapping[str, Any]) -> Tokens:
        prompt = _field(record, self.how.prompt_field)
        completion = _field(record, self.how.completion_field)
        if isinstance(prompt, str) and isinstance(completion, str):
            begin, whole = self._tokenizer.encode([prompt, prompt + completion])
            if whole[-1:] != [self._tokenizer.end]:
                whole = [*whole, self._tokenizer.end]
            return _with_labels(whole, [(_common(begin, whole), len(whole))])
        if isinstance(prompt, str) or isinstance(completion, str):
            raise MusterError(
                f"{self.how.prompt_field} and {self.how.completion_field} are of different kinds",
                why=f"one is a {type(prompt).__name__}, the other a {type(completion).__name__}",
                fix="store a string in both, or a list of messages in both",
            )
        before = _messages(prompt, self.how.prompt_field)
        after = _messages(completion, self.how.completion_field)
        template = _ChatTemplate(self._tokenizer)
        return template.completion(before, after, _tools(record))

    def _text_or_tokens(self, record: Mapping[str, Any]) -> str | Tokens:
        name = self.how.text_field
        field = name if record.get("input_ids") is None else "input_ids"
        value = record.get(field)
        if isinstance(value, str) and field == name:
            return value
        for other, content in record.items():
            if _is_chat(content):
                raise MusterError(
                    f"the field {other} holds chat messages, but the first record is text or tokens",
                    fix=f"name the field of the messages: data.columns: {{messages: {other}}}",
                )
        if field == name and not isinstance(value, list | tuple) and not hasattr(value, "tolist"):
            return cast(str, _field(record, name, str))
        return _tokens(record, field)


class _ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        raw = getattr(tokenizer, "raw", None)
        if raw is None or not raw.chat_template:
            raise Impossible(
                "the data is chats, but the tokenizer has no chat template",
                why="a chat template turns messages into text; base models often have none",
                fix="use the instruct model's tokenizer (data.tokenizer), or put a Jinja file into the "
                "tokenizer's folder: chat_template.jinja",
            )
        self._raw = raw
        template = raw.chat_template
        if isinstance(template, dict):  # several named ones
            template = template.get("default", "")
        self._has_marks = bool(_GENERATION.search(template))

    def tokens(self, messages: list[Any], tools: Any) -> Tokens:
        """Return the tokens of a conversation; its assistant's messages are the targets."""
        if self._has_marks:
            return self._by_marks(messages, tools)
        return self._by_prefixes(messages, tools)

    def completion(self, prompt: list[Any], completion: list[Any], tools: Any) -> Tokens:
        """Return the tokens of a prompt and its completion; the completion is the target."""
        whole = self._text([*prompt, *completion], tools)
        begin = self._text(prompt, tools, generate=True)
        ids, begin_ids = self._ids([whole, begin])
        _refuse_other_beginning(whole, begin, len(prompt))
        return _with_labels(ids, [(_common(begin_ids, ids), len(ids))])

    def _by_marks(self, messages: list[Any], tools: Any) -> Tokens:
        try:
            encoded = self._raw.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:  # templates raise errors of their own
            raise _template_error(error) from None
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        return Tokens(
            ids, [token if seen else IGNORED for token, seen in zip(ids, mask, strict=True)]
        )

    def _by_prefixes(self, messages: list[Any], tools: Any) -> Tokens:
        """Find the answers without marks: each is what its message adds to a prompt for it."""
        whole = self._text(messages, tools)
        texts = [whole]
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = self._text(messages[:number], tools, generate=True)
            until = self._text(messages[: number + 1], tools)
            _refuse_other_beginning(whole, begin, number)
            _refuse_other_beginning(whole, until, number + 1)
            texts += [begin, until]
        ids, *parts = self._ids(texts)
        spans = [
            (_common(begin, ids), _common(until, ids))
            for begin, until in zip(parts[::2], parts[1::2], strict=True)
        ]
        return _with_labels(ids, spans)

    def _text(self, messages: list[Any], tools: Any, *, generate: bool = False) -> str:
        try:
            text = self._raw.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # templates raise errors of their own
            raise _template_error(error) from None
        return cast(str, text)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._raw(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return cast(list[list[int]], encoded["input_ids"])


def truncated(document: Tokens, length: int) -> Tokens:
    """Return the beginning of a document; empty if none of its tokens would count in the loss.

    The first token of a document has no context, so it never counts.
    """
    ids = document.ids[:length]
    labels = None if document.labels is None else document.labels[:length]
    if labels is not None and all(label == IGNORED for label in labels[1:]):
        return Tokens([])
    return Tokens(ids, labels)


def pieces_of(document: Tokens, tokenizer: "Tokenizer") -> list[tuple[str, bool]]:
    """Return a document as texts, each with whether its tokens count in the loss."""
    labels = document.ids if document.labels is None else document.labels
    counted = [place > 0 and label != IGNORED for place, label in enumerate(labels)]
    pieces: list[tuple[str, bool]] = []
    begin = 0
    for place in range(1, len(counted) + 1):
        if place == len(counted) or counted[place] != counted[begin]:
            pieces.append((tokenizer.decode(document.ids[begin:place]), counted[begin]))
            begin = place
    return pieces


def _with_labels(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    labels = [IGNORED] * len(ids)
    for begin, end in spans:
        labels[begin:end] = ids[begin:end]
    return Tokens(ids, labels)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning.

    The last token of a prompt may be another one if a text follows.
    """
    for place, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        if mine != theirs:
            return place
    return min(len(first), len(second))


def _refuse_other_beginning(whole: str, begin: str, messages: int) -> None:
    """Check that the template writes the first messages in the same way if more follow."""
    if not whole.startswith(begin):
        raise MusterError(
            "the answers of a conversation cannot be found",
            why=f"the chat template writes the first {messages} messages differently if others "
            "follow; templates that drop earlier reasoning do so",
            fix="use a template that marks answers with {% generation %} (chat_template.jinja in the "
            "tokenizer's folder), or split the conversation so that each record ends with the answer to "
            "train on",
        )


def _template_error(error: Exception) -> MusterError:
    return MusterError(
        "the chat template rejects a conversation",
        why=first_line(error),
        fix="change the messages as the template requires; many want user and assistant in turn",
    )


def _tools(record: Mapping[str, Any]) -> Any:
    """Return the tools that a record lists for the template; some datasets store them as JSON."""
    tools = record.get("tools")
    if not isinstance(tools, str) or not tools:
        return tools or None
    try:
        return json.loads(tools)
    except (ValueError, RecursionError) as error:
        raise MusterError("the field tools is not JSON", why=str(error)) from None


def _is_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and ("role" in first or "from" in first)


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Return messages with role and content, checked."""
    try:
        found = msgspec.convert(value, list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise _no_messages(field, str(error)) from None
    if not found:
        raise _no_messages(field, "the list is empty")
    messages = []
    for number, message in enumerate(found, start=1):
        if "role" not in message and "from" in message:
            role = _ROLES.get(message["from"], message["from"])
            message = {"role": role, "content": message.get("value")}
        # A table has all fields in all rows; templates test which ones a message has.
        present = {name: item for name, item in message.items() if item is not None}
        if "tool_calls" in present:
            present.setdefault("content", None)
        if not isinstance(present.get("role"), str) or "content" not in present:
            raise _no_messages(field, f"message {number} lacks its role or its content")
        messages.append(present)
    return messages


def _no_messages(field: str, why: str) -> MusterError:
    return MusterError(
        f"the field {field} holds no chat messages",
        why=why,
        fix='store a list such as [{"role": "user", "content": "…"}, '
        '{"role": "assistant", "content": "…"}]',
    )


def _field(record: Mapping[str, Any], name: str, kind: type = object) -> Any:
    """Return a field's value; it must be of a kind, and not be missing or null."""
    value = record.get(name)
    if value is None or not isinstance(value, kind):
        filled = [field for field, content in record.items() if content is not None]
        problem = "is missing or null"  # a data set gives all records the same fields
        if value is not None:
            problem = f"is of type {type(value).__name__}, not a string"
        raise MusterError(
            f"the field {name} {problem}",
            why=f"the record has {', '.join(filled) or 'no other fields'}",
            fix="fix the record, or name another field in data.columns",
        )
    return value


def _tokens(record: Mapping[Any, Any], field: str) -> Tokens:
    """Return the ids that a record has in a field, without padding, and its labels."""
    ids = _integers(record, field)
    labels = _integers(record, "labels") if record.get("labels") is not None else None
    if labels is not None and len(labels) != len(ids):
        raise _unusable("labels", f"{len(labels)} labels for {len(ids)} tokens")
    if record.get("attention_mask") is not None:
        mask = _integers(record, "attention_mask")
        if len(mask) != len(ids):
            raise _unusable("attention_mask", f"{len(mask)} entries, {len(ids)} tokens")
        ids = array("q", compress(ids, mask))
        labels = None if labels is None else array("q", compress(labels, mask))
    if (lowest := min(ids, default=0)) < 0:
        raise _unusable(field, f"one of its ids is {lowest}")
    wrong = next((label for label in labels or () if label < 0 and label != IGNORED), None)
    if wrong is not None:
        raise _unusable("labels", f"one of them is {wrong}")
    return Tokens(ids, labels)


def _integers(record: Mapping[Any, Any], field: str) -> "array[int]":
    """Return a field's list of integers; arrays and tensors are accepted."""
    value = record[field]
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        return array("q", value)
    except (TypeError, OverflowError) as error:
        raise _unusable(field, str(error)) from None


def _unusable(field: str, why: str) -> MusterError:
    return MusterError(
        f"a record's field {field} cannot be used",
        why=why,
        fix=f"store integers: token ids from 0 in input_ids, the same or {IGNORED} in labels, 1 or 0 in "
        "attention_mask",
    )
