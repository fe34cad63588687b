"""Compiles constraints for one model, and caches the most recently used grammars."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from attrs import Factory, evolve, frozen

from paged_sdk.constraints.grammar import Grammar, Language, error_of
from paged_sdk.constraints.json_schema import Problem, has_open_names, read_schema
from paged_sdk.constraints.reasons import problem_of
from paged_sdk.constraints.schema_parts import Schema
from paged_sdk.constraints.vocabulary import Vocabulary
from paged_sdk.errors import ConstraintError, QueueFullError, shortened
from paged_sdk.system.threads import thread_must_start
from paged_sdk.types.call_grammar import CallGrammar, JsonRule, JsonSpacing
from paged_sdk.types.constraint import Constraint

if TYPE_CHECKING:
    import llguidance

__all__ = ["GrammarCompiler"]

_MAX_SECONDS: Final = 10.0
"""Time limit of one compilation. Of 11,305 schemas in use, 84 % compile; the slowest takes 7.2 s, 99 % take less than
0.04 s."""
_MAX_KEPT: Final = 64
_MAX_AT_ONCE: Final = 2
_MAX_PENDING: Final = 256

# With llguidance's default, 250,000, one grammar may take half a gigabyte.
_MAX_STATES: Final = 50_000
# llguidance cannot number more than 65,525.
_MAX_SYMBOLS: Final = 65_000

# llguidance recurses through rules and references: about 5 kB of stack per rule, and more than 10 kB per reference of a
# schema, of which it refuses 12,000. On the usual stack of 8 MB, 3,000 of either overflow it and end the process.
_STACK_SIZE: Final = 256 << 20
_STACK_LOCK: Final = Lock()
_MAX_RULES: Final = 32_000

_STRICT: Final[Mapping[str, Any]] = MappingProxyType({"lenient": False, "coerce_one_of": False})
_SPACINGS: Final[Mapping[JsonSpacing, Mapping[str, Any]]] = MappingProxyType(
    {
        "line": MappingProxyType({**_STRICT, "whitespace_pattern": "[ ]"}),
        "free": MappingProxyType({**_STRICT, "whitespace_pattern": r"[ ]|\n[ \t]{0,32}"}),
        "none": MappingProxyType({**_STRICT, "whitespace_flexible": False}),
    }
)
"""Tool calls are written on one line, as most models were trained to, so that no tokens are spent on indentation."""
_CONTROL_CHARACTER: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")


@frozen(eq=False)
class _Entry:
    """Holds a constraint that is compiled, being compiled or queued.

    :ivar begun: set when its compilation starts
    :ivar result: its grammar, or why it cannot be enforced
    """

    constraint: Language
    begun: Event = Factory(Event)
    result: Future[Grammar | Problem] = Factory(Future)


class GrammarCompiler:
    """Compiles constraints. Thread-safe; calls block, so they must not come from an event loop's thread.

    A compilation cannot be interrupted: its callers give up after ten seconds, and it continues until llguidance's own
    limits end it. At most two compilations run at once; up to 256 others wait, for at most ten seconds.

    :param vocabulary: makes the model's vocabulary; called once, when the first constraint is compiled
    :param max_seconds: limits how long a constraint waits for its turn, and how long its compilation takes
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, max_seconds: float = _MAX_SECONDS) -> None:
        self._make_vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._lock = Lock()
        self._entries: OrderedDict[Language, _Entry] = OrderedDict()
        self._waiting: deque[_Entry] = deque()
        self._num_threads = 0
        self._vocabulary_lock = Lock()
        self._vocabulary: tuple[Vocabulary, llguidance.LLTokenizer] | None = None

    def compile(self, constraint: Language) -> Grammar:
        """Return the grammar of a constraint; block until it is compiled.

        :raises ConstraintError: the constraint cannot be enforced, or compiling it takes longer than ten seconds
        :raises QueueFullError: 256 constraints wait to be compiled, or its turn has not come after ten seconds
        """
        entry = self._entry(constraint)
        if not entry.begun.wait(self._max_seconds):
            raise _queue_full(f"other constraints have been compiled for {self._max_seconds:g} s")
        try:
            compiled = entry.result.result(self._max_seconds)
        except TimeoutError:
            compiled = Problem(f"compiling it takes longer than {self._max_seconds:g} s")
        if isinstance(compiled, Problem):
            where = f" at {shortened(compiled.position) or 'its root'}" if compiled.position is not None else ""
            kind = constraint.kind if compiled.kind is None else compiled.kind
            raise ConstraintError(
                f"the constraint ({kind}) cannot be enforced{where}: {compiled.message}",
                kind=kind,
                keyword=compiled.keyword,
                position=compiled.position,
            )
        return compiled

    def _entry(self, constraint: Language) -> _Entry:
        with self._lock:
            entry = self._entries.get(constraint)
            if entry is not None:
                self._entries.move_to_end(constraint)
                return entry
            if len(self._waiting) >= _MAX_PENDING:
                raise _queue_full(f"{_MAX_PENDING} constraints wait to be compiled")
            entry = _Entry(constraint)
            if self._num_threads < _MAX_AT_ONCE:
                # Not a thread of an executor: the interpreter would wait for it at exit.
                thread = Thread(target=self._run, name="paged-sdk grammar", daemon=True)
                with thread_must_start("to compile a constraint in"), _deep_stack():
                    thread.start()
                self._num_threads += 1
            self._waiting.append(entry)
            self._entries[constraint] = entry
            done = (each for each, other in self._entries.items() if other.result.done())
            for oldest in list(done)[: max(0, len(self._entries) - _MAX_KEPT)]:
                del self._entries[oldest]
            return entry

    def _run(self) -> None:
        """Compile waiting constraints until none is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                entry = self._waiting.popleft()
            entry.begun.set()
            try:
                entry.result.set_result(self._compiled(entry.constraint))
            except BaseException as error:  # a panic of llguidance is not an Exception
                entry.result.set_exception(error)

    def _compiled(self, constraint: Language) -> Grammar | Problem:
        import llguidance

        schemas: dict[JsonRule, Schema] = {}
        match constraint:
            case CallGrammar(lark=lark, rules=rules):
                lines = [lark]
                for rule in rules:
                    checked = read_schema(rule.schema)
                    if isinstance(checked, Problem):
                        return _of_rule(rule, checked)
                    options = _json_options(checked, json.dumps(checked), _SPACINGS[rule.spacing])
                    if isinstance(options, Problem):
                        return _of_rule(rule, options)
                    schemas[rule] = checked
                    lines.append(f"{rule.name}: %json {json.dumps({**checked, 'x-guidance': options})}")
                if lark.count("\n") > _MAX_RULES:  # one rule per line, with few brackets
                    return _TOO_MANY
                grammar = llguidance.LLMatcher.grammar_from_lark("\n".join(lines))
            case Constraint(kind="json_schema", source=source):
                checked = read_schema(source)
                if isinstance(checked, Problem):
                    return checked
                schemas[JsonRule("", "", source)] = checked
                text = json.dumps(checked)
                options = _json_options(checked, text, _SPACINGS["none" if constraint.compact else "free"])
                if isinstance(options, Problem):
                    return options
                try:
                    grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
                except ValueError as error:  # deeper than 127 levels
                    return Problem(shortened(str(error)))
            case Constraint(kind="regex", source=source):
                grammar = llguidance.LLMatcher.grammar_from_regex(source)
            case Constraint(kind="lark" | "llguidance", source=source) if _num_nested(source) > _MAX_RULES:
                return _TOO_MANY
            case Constraint(kind="lark", source=source):
                grammar = llguidance.LLMatcher.grammar_from_lark(source)
            case Constraint(source=source):
                grammar = source
        vocabulary, tokenizer = self._tokens()
        limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_STATES, max_grammar_size=_MAX_SYMBOLS, verbose_errors=False
        )
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        problem = error_of(matcher) or "; ".join(matcher.get_grammar_warnings())
        if not problem:
            # Some errors appear only when a mask is computed. A copy does that: every text starts from `matcher`.
            beginning = matcher.deep_copy()
            may_begin = any(beginning.compute_bitmask())
            problem = error_of(beginning) or ("" if may_begin else "no token of the vocabulary begins a text of it")
        if problem:
            return _problem(shortened(problem), schemas)
        return Grammar(matcher, vocabulary.end_ids)

    def _tokens(self) -> tuple[Vocabulary, llguidance.LLTokenizer]:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                vocabulary = self._make_vocabulary()
                self._vocabulary = vocabulary, vocabulary.for_grammars()
            return self._vocabulary


_TOO_MANY: Final = Problem(f"it has more than {_MAX_RULES:,} rules and brackets")


def _num_nested(grammar: str) -> int:
    """Return an upper bound of the nesting depth of a grammar's rules and brackets."""
    return sum(map(grammar.count, ":(["))


@contextmanager
def _deep_stack() -> Iterator[None]:
    """Give threads that start in the block a stack deep enough for the recursion that llguidance allows."""
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_SIZE)
        try:
            yield
        finally:
            threading.stack_size(before)


def _queue_full(reason: str) -> QueueFullError:
    return QueueFullError(reason, limit=_MAX_PENDING)


def _json_options(schema: Schema, text: str, options: Mapping[str, Any]) -> Any | Problem:
    """Return llguidance's options for a schema.

    :param text: the schema as JSON
    :param options: options for white space and strictness
    """
    if not has_open_names(schema):
        return {**options}
    # Only with these escapes does each property name have a single spelling, so that none can be repeated under another
    # one. Other control characters then cannot be written.
    if _CONTROL_CHARACTER.search(text) is not None:
        return Problem(
            "it has a control character, which is supported only if every object that it describes has "
            "additionalProperties: false"
        )
    return {**options, "json_allowed_escapes": 'nrbtf\\"'}


def _of_rule(rule: JsonRule, problem: Problem) -> Problem:
    """Return the problem of a rule's schema as one of the grammar."""
    return evolve(problem, message=f"{rule.label}: {problem.message}", kind=rule.kind)


def _problem(message: str, schemas: Mapping[JsonRule, Schema]) -> Problem:
    """Return the problem that an error of llguidance describes, located in the first schema that it fits.

    :param schemas: each schema as it was rewritten, by its rule
    """
    problems = {rule: _located(message, rule.schema, schema) for rule, schema in schemas.items()}
    for rule, problem in problems.items():
        if problem.position is not None and rule.label:
            return _of_rule(rule, evolve(problem, message=message))
    return next(iter(problems.values()), Problem(message))


def _located(message: str, source: str, rewritten: Schema) -> Problem:
    """Return the problem at its position in the schema as it was given, if the keyword is in that."""
    problem = problem_of(message, json.loads(source))
    return problem if problem.position is not None else problem_of(message, rewritten)
