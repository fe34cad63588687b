"""Templates that would take hours or gigabytes, by what they abuse. Each is small, and most are one operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

_HUGE = "10000000000"

# One operation of Python's own each, which nothing can look into.
_OPERATIONS = {
    "repeated": f"'x' * {_HUGE}",
    "repeated from the right": f"{_HUGE} * 'x'",
    "repeated list": f"[0] * {_HUGE}",
    "repeated tuple": f"(0, 1) * {_HUGE}",
    "ljust": f"'x'.ljust({_HUGE})",
    "rjust": f"'x'.rjust({_HUGE})",
    "center": f"'x'.center({_HUGE})",
    "zfill": f"'x'.zfill({_HUGE})",
    "a gigabyte of ljust": "'x'.ljust(1000000000)|length",
    "many ljust": "[" + "'x'.ljust(15000000)," * 99 + "]|length",
    "expandtabs": "'\\t'.expandtabs(2000000000)",
    "many tabs": "('\\t' * 99999).expandtabs(99999)",
    "percent width": f"'%{_HUGE}d' % 1",
    "percent star": "'%*d' % (2000000000, 1)",
    "percent precision": "'%.2000000000f' % 1.5",
    "percent of text": "'%2000000000s' % 'x'",
    "format width": "'{:2000000000}'.format(1)",
    "nested format width": "'{:>{w}}'.format(1, w=2000000000)",
    "format precision": "'{:.2000000000f}'.format(1.5)",
    "format_map": "'{x:2000000000}'.format_map({'x': 1})",
    "format filter": "'%2000000000d'|format(1)",
    "center filter": f"'x'|center({_HUGE})",
    "indent filter": "('x\\n' * 99999)|indent(99999)",
    "indent width": "'x\\ny'|indent(2000000000)",
    "indent of text": "('x\\n' * 9999)|indent('y' * 99999)",
    "json indent": "messages|tojson(indent=1000000000)",
    "json indent of text": "range(9999)|list|tojson(indent='y' * 99999)",
    "json separators": "range(9999)|list|tojson(separators=['x' * 99999, 'y'])",
    "replace": "('x' * 999999).replace('x', 'y' * 99999)",
    "replace nothing": "('x' * 999999).replace('', 'y' * 99999)",
    "replace filter": "('x' * 999999)|replace('x', 'y' * 99999)",
    "translate": "('x' * 99999).translate({120: 'y' * 99999})",
    "maketrans": "('x' * 99999).translate(''.maketrans({'x': 'y' * 99999}))",
    "join": "('y' * 99999).join('x' * 99999)",
    "join filter": "range(99999)|join('y' * 99999)",
    "join attribute": "([{'a': 'x' * 99999}] * 99999)|join('y', attribute='a')",
    "bytes": "(1).to_bytes(2000000000, 'big')|length",
    "utf-32": "('x' * 15000000).encode('utf-32').hex()",
    "punycode": "('ü' * 1000000).encode('punycode')|length",
    "idna": "('ü' * 1000000).encode('idna')|length",
    "power": f"10 ** (10 ** {_HUGE})",
    "negative power": f"(10 ** 999) ** {_HUGE}",
    "round": "1.5|round(1000000000)",
    "wordwrap": "('x ' * 999999)|wordwrap(1, wrapstring='y' * 9999)",
    "batch": "'x'|batch(1000000000, 'y')|list|length",
    "slice filter": "messages|slice(1000000000)|list|length",
    "slice with filling": "messages|slice(100000000, 'y')|list|length",
    "sum of lists": "(range(99999)|map('list')|list)|sum(start=[])" + "|length",
    "sum from a list": "([[1] * 999] * 9999)|sum(start=[])|length",
    "title": "('ab ' * 5000000)|title|length",
    "capitalize": "('ab ' * 5000000)|capitalize|title|length",
    "wordcount": "('ab ' * 5000000)|wordcount",
    "striptags": "('<' * 999999)|striptags|length",
    "comment tags": "('<!--' * 299999)|striptags|length",
    "urlize": "('www.x.' * 199999)|urlize|length",
    "brackets of a url": "('http://x' ~ ')' * 199999)|urlize|length",
    "escape": "('&' * 15000000)|escape|length",
    "escape again": "('&' * 999999)" + "|forceescape" * 40 + "|length",
    "urlencode again": "('%' * 999999)" + "|urlencode" * 40 + "|length",
    "json again": "'\"'" + "|tojson" * 40 + "|length",
    "pprint": "([[[]]] * 999999)|pprint|length",
    "xmlattr": "{'a': '&' * 15000000}|xmlattr|length",
    "sort": "('ab' * 7000000)|sort|length",
    "unique": "range(99999)|map('string')|list|unique|list|length",
    "groupby": "([{'a': 1}] * 9999999)|groupby('a')|length",
    "batch of one": "('x' * 15000000)|batch(1)|list|length",
    "list of text": "('xy' * 8000000)|list|length",
    "reverse": "('xy' * 8000000)|reverse|list|length",
    "items": "('xy' * 8000000)|map('upper')|map('lower')|list|length",
    "random": "('xy' * 8000000)|list|random",
    "truncate": "('xy ' * 5000000)|truncate(4999999)|length",
    "int of text": "('9' * 15000000)|int",
    "int of hex": "('f' * 15000000)|int(base=16) * 3",
    "float of text": "('9' * 15000000)|float",
    "lipsum": "lipsum(n=1000000)|length",
    "long lipsum": "lipsum(n=1, min=100000000, max=100000001)|length",
    "date": "strftime_now('%1000000000d')|length",
    "long date": "strftime_now('%A' * 5000000)|length",
    "split": "('x ' * 8000000).split(' ')|length",
    "split all": "('xy' * 8000000).split('x')|map('upper')|list|length",
    "splitlines": "('\\n' * 15000000).splitlines()|length",
    "partition": "('xy' * 8000000).rpartition('z')|map('length')|list",
    "casefold": "('ß' * 15000000).casefold()|upper|length",
    "upper": "('ΐ' * 15000000)|upper|length",
    "needle": "('a' * 999999 ~ 'b') in ('a' * 9999999)",
    "strip a set": "('ab' * 999999).strip('a' * 999999)",
    "count": "('a' * 15000000).count('a' * 50)",
    "cycler": "cycler(*range(99999)|list * 999).next()",
    "dict of keys": "dict(range(99999)|map('string')|batch(2)|list)|length",
    "range": f"range({_HUGE})|list|length",
    "sum of a range": "range(99999)|map('list')|sum",
    "select": "(range(99999)|list * 999)|select('odd')|list|length",
    "odd text": "'%2000000000d' is odd",
    "divisible text": "'%2000000000d' is divisibleby(5)",
    "filesizeformat": "(10 ** 999 * 10 ** 999)|filesizeformat",
    "printf through map": "['%2000000000d']|map('format', 1)|list|length",
    "center through map": "['x']|map('center', 2000000000)|list|length",
    "attr": "('x'|attr('ljust'))(2000000000)|length",
    "item": "('x'['ljust'])(2000000000)|length",
}

# What grows step by step; `S` is a step, run 60 times.
_STEPS = {
    "squares": ("3", "ns.x * ns.x"),
    "sum of itself": ("'ab'", "ns.x + ns.x"),
    "joined to itself": ("'ab'", "ns.x ~ ns.x"),
    "list of itself": ("[1, 2]", "ns.x + ns.x"),
    "percent of itself": ("'ab%s'", "ns.x % ns.x"),
    "format of itself": ("'{0}{0}'", "ns.x.format(ns.x)"),
    "replaced by itself": ("'aa'", "ns.x.replace('a', ns.x)"),
    "replaced by filter": ("'aa'", "ns.x|replace('a', ns.x)"),
    "join of itself": ("'aa'", "ns.x|join(ns.x)"),
    "join method of itself": ("'aa'", "ns.x.join(ns.x)"),
    "json of itself": ("'\"'", "ns.x|tojson"),
    "escape of itself": ("'&&&&'", "(ns.x|forceescape)|replace('a', '&')"),
    "nested lists as text": ("[]", "[ns.x, ns.x]"),
    "nested lists of four": ("[]", "[ns.x, ns.x, ns.x, ns.x]"),
    "nested tuples": ("()", "(ns.x, ns.x)"),
    "nested mappings": ("{}", "{'a': ns.x, 'b': ns.x}"),
    "nested dict()": ("{}", "dict(a=ns.x, b=ns.x)"),
    "nested namespaces": ("1", "namespace(a=ns.x, b=ns.x)"),
    "list of letters": ("'ab'", "(ns.x|list + ns.x|list)|join"),
    "slices": ("'ab'", "ns.x[:] + ns.x[::-1]"),
    "upper": ("'ß'", "(ns.x|upper)|replace('S', 'ß')"),
    "power of itself": ("7", "ns.x ** 3"),
    "urlencode": ("'%'", "ns.x|urlencode ~ ns.x"),
    "indent": ("'a\\n'", "ns.x|indent(ns.x|length) ~ ns.x"),
    "repeated by its length": ("'ab'", "ns.x * ns.x|length"),
    "translate": ("'aa'", "ns.x.translate({97: ns.x})"),
    "string of a list": ("'a'", "[ns.x, ns.x]|string"),
}
_ENDS = {
    "printed": "{{ ns.x }}",
    "as json": "{{ ns.x|tojson|length }}",
    "as text": "{{ (ns.x|string)|length }}",
    "compared": "{% set y = namespace(x=ns.x) %}{{ ns.x == y.x }}{{ [ns.x] == [ns.x|list] }}",
}

_TURNS = "{% for i in range(99999) %}"
_STATEMENTS = {
    "variables": "".join(f"{{% set v{i} = 'x' * 15000000 ~ {i} %}}" for i in range(200)),
    "captured": _TURNS * 2 + "{% set x %}" + "y" * 9999 + "{% endset %}{% endfor %}{% endfor %}",
    "captured and kept": "{% set ns = namespace(x=[]) %}" + _TURNS + "{% set x %}" + "y" * 9999 + "{{ i }}{% endset %}"
    "{% set ns.x = [x, ns.x] %}{% endfor %}",
    "captured text": "{% set x %}" + _TURNS * 2 + "y" * 999 + "{% endfor %}{% endfor %}{% endset %}{{ x|length }}",
    "captured doubling": "{% set x = 'y' %}" + "{% set x %}{{ x }}{{ x }}{{ x }}{% endset %}" * 40,
    "captured by a filter": "{% filter upper %}" + _TURNS * 2 + "yyyyyyyyy{% endfor %}{% endfor %}{% endfilter %}",
    "filter blocks": "{% filter center(1000000000) %}x{% endfilter %}",
    "doubling filters": "{% filter replace('y', 'yyyy') %}" * 30 + "y" + "{% endfilter %}" * 30,
    "macro doubling": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}y{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "macro chain": "".join(
        f"{{% macro f{i + 1}() %}}" + f"{{{{ f{i}() }}}}" * 9 + "{% endmacro %}" for i in range(1, 30)
    )
    + "{% macro f1() %}yyyyyyyyy{% endmacro %}{{ f30() }}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro text": "{% macro f(x) %}" + "{{ x }}" * 999 + "{% endmacro %}{{ f(f(f('y' * 999))) }}",
    "macro by varargs": "{% macro f() %}{{ varargs }}{% if varargs|string|length < 10**9 %}{{ f(varargs, varargs) }}"
    "{% endif %}{% endmacro %}{{ f(1) }}",
    "call blocks": "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{{ caller() }}{% endcall %}{{ caller() }}"
    "{{ caller() }}{% endif %}{% endmacro %}{% call f(300) %}y{% endcall %}",
    "recursive loop": "{% for a in [1, 2, 3] recursive %}{{ loop([1, 2, 3]) if loop.depth < 90 }}{% endfor %}",
    "nested loops": _TURNS * 3 + "{% endfor %}" * 3,
    "loops in text": _TURNS * 3 + "y{{ i }}" + "{% endfor %}" * 3,
    "loops of 64": "{% for i in (1,) * 64 %}" * 9 + "{% endfor %}" * 9,
    "loops of lists": "{% set l = [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16] %}"
    + "{% for i in l %}" * 15
    + "y"
    + "{% endfor %}" * 15,
    "loops over messages": "{% for m in messages %}" * 15 + "{{ m.content }}" + "{% endfor %}" * 15,
    "loop with a filter": "{% for i in range(99999) if range(99999)|list|length == i %}{% endfor %}",
    "lengths of loops": _TURNS * 2 + "{{ loop.length }}" + "{% endfor %}" * 2,
    "cycling": _TURNS * 2 + "{{ loop.cycle('a' * 9999, 'b') }}" + "{% endfor %}" * 2,
    "changes": _TURNS * 2 + "{{ loop.changed(range(99999)|list) }}" + "{% endfor %}" * 2,
    "searches": "{% set x = 'a' * 999999 %}" + "{% if 'a' * 99 ~ 'b' in x %}y{% endif %}" * 999,
    "cheap searches": "{% set x = 'aaaaaaaaaaaaaaaa' %}"
    + "{% set x = x + x %}" * 16
    + "{% set y = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab' %}{% if y in x %}y{% endif %}"
    + "{% if y in x %}y{% endif %}" * 999,
    "comparisons": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x + x %}" * 16 + "{% set y = x + '' %}"
    "{% set y = y[1:] + 'a' %}" + "{% if x == y %}y{% endif %}" * 1200,
    "uppers": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x + x %}" * 16 + "{{ x.upper().lower()|length }}" * 999,
    "slices": "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x + x %}" * 15 + "{% set y = x[1:] %}" * 999,
    "kept slices": "{% set x = 'aaaaaaaaaaaaaaaa' %}"
    + "{% set x = x + x %}" * 15
    + "".join(f"{{% set v{i} = x[1:] %}}" for i in range(1500)),
    "constant text": _TURNS * 2 + "y" * 9000 + "{% endfor %}" * 2,
    "namespaces": "{% set ns = namespace(l=[]) %}" + _TURNS + "{% set ns.l = ns.l + [i] %}{% endfor %}",
    "strings in turns": "{% set ns = namespace(s='') %}" + _TURNS + "{% set ns.s = ns.s ~ i %}{% endfor %}",
    "messages repeated": "{% set ns = namespace(l=messages) %}"
    "{% for i in range(30) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l|tojson }}",
    "messages compared": "{% set ns = namespace(l=messages, k=messages) %}{% for i in range(20) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.k = [ns.k, ns.k] %}{% endfor %}{{ ns.l == ns.k }}",
    "map of map": "{% set ns = namespace(x=messages) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x|map('default') %}{% endfor %}{{ ns.x|list }}",
    "chain of slices": "{% set ns = namespace(x='xy' * 999999) %}" + _TURNS + "{% set ns.x = ns.x[1:] + 'z' %}"
    "{% endfor %}",
    "chain of selections": "{% set ns = namespace(x=messages) %}"
    + _TURNS
    + "{% set ns.x = ns.x|selectattr('role') %}{% endfor %}{{ ns.x|list|length }}",
    "searches from the end": "{% set x = 'aaaaaaaaaaaaaaaa' %}"
    + "{% set x = x + x %}" * 15
    + "{% set y = 'a' + x[:200000] + 'b' + x[:200000] %}{{ x.rfind(y) }}{{ x.rsplit(y)|length }}",
    "remainders": "{% set n = 3 %}"
    + "{% for i in [1,2,3,4,5,6,7,8,9] %}" * 4
    + "{% set n = n + n %}" * 400
    + "{{ n % 7 }}" * 99
    + "{% endfor %}" * 4,
    "range shadowed": "{% set range = 'x'.ljust %}{{ range(2000000000)|length }}",
    "namespace shadowed": "{% set namespace = 'x'.center %}{{ namespace(2000000000)|length }}",
    "macro shadowed": "{% macro f(n) %}{% endmacro %}{% set f = 'x'.zfill %}{{ f(2000000000)|length }}",
    "strip shadowed": "{% set ns = namespace(strip='x'.ljust) %}{{ ns.strip(2000000000)|length }}",
    "get of a mapping": "{{ {'get': 'x'.ljust}.get('get')(2000000000)|length }}",
    "items shadowed": "{% set d = {'items': 'x'.ljust, 'a': 'x'.ljust} %}{{ d.a(2000000000) }}"
    "{{ d.items(2000000000) }}",
    "undo of a method": "{% set f = 'x'.split %}{{ f.__self__.ljust(2000000000) }}",
    "do": "{% set ns = namespace(x='x') %}{% set ns.y = ns.x.ljust(2000000000) %}",
    "with": "{% with x = 'x'.ljust(2000000000) %}{{ x|length }}{% endwith %}",
    "condition": "{% if 'x'.ljust(2000000000) %}y{% endif %}",
    "default": "{{ nothing|default('x'.ljust(2000000000))|length }}",
    "argument": "{{ messages|map(attribute='x' * 15000000)|list }}",
    "self": "{% block a %}{{ self.a() }}{% endblock %}",
    "two blocks": "{% block a %}{{ self.b() }}{{ self.b() }}{% endblock %}{% block b %}{{ self.a() }}{% endblock %}",
}

# What takes long, or much memory, before anything is rendered.
_SOURCES = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "attributes": "{{ messages" + ".a" * 5000 + " }}",
    "filters": "{{ messages" + "|list" * 5000 + " }}",
    "additions": "{{ " + "1 + " * 8000 + "1 }}",
    "joins": "{{ " + "'y' ~ " * 5000 + "'y' }}",
    "conditions": "{{ " + "1 if 1 else " * 2000 + "1 }}",
    "negations": "{{ " + "not " * 5000 + "1 }}",
    "branches": "{% if 0 %}" + "{% elif 0 %}" * 2500 + "{% endif %}",
    "nested branches": "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "nested loops": "{% for i in [1] %}" * 500 + "{% endfor %}" * 500,
    "a long text": "y" * 5_000_000,
    "long spaces": "{{ messages" + " " * 500_000 + "}}",
    "many outputs": "{{ messages }}" * 200_000,
    "many lines": "\n" * 2_000_000 + "{{ 1 }}",
    "many openings": "{{" * 500_000,
    "many comments": "{# y #}" * 300_000,
    "no end of comments": "{# " * 300_000,
    "a long name": "{{ " + "y" * 1_000_000 + " }}",
    "a long number": "{{ " + "9" * 1_000_000 + " }}",
    "a long literal": "{{ '" + "\\x41" * 1_000_000 + "' }}",
    "many variables": "".join(f"{{% set v{i} = {i} %}}" for i in range(50_000)),
    "raw": "{% raw %}" * 100_000,
    "spaces before blocks": (" " * 999 + "{% set x = 1 %}\n") * 1_000,
}


def _bombs() -> Iterator[tuple[str, str]]:
    for name, expression in _OPERATIONS.items():
        yield name, "{{ " + expression + " }}"
        yield f"{name}, in a loop", "{% for m in messages %}{% set x = " + expression + " %}{% endfor %}y"
    for name, (start, step) in _STEPS.items():
        loop = (
            "{% set ns = namespace(x=" + start + ") %}{% for i in range(60) %}{% set ns.x = " + step + " %}{% endfor %}"
        )
        for end, code in _ENDS.items():
            yield f"{name}, {end}", "{% set ns = namespace(x=" + start + ") %}" + loop + code
    yield from _STATEMENTS.items()
    for name, source in _SOURCES.items():
        yield f"source: {name}", source


BOMBS: Mapping[str, str] = MappingProxyType(dict(_bombs()))
