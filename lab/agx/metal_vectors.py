"""Rewrites expressions that clang does not accept: constructors of vectors, casts, function pointers."""

import re

from metal_declarations import KEYW, next_sig
from metal_tokens import T, lex, match_angle, sig, split_commas, txt


def fix_vectors(toks, names):
    """Replaces constructors and casts of vector types with functions of the shim.

    `T(a, b)` and `static_cast<T>(a)` become `msl_make<T>(...)`, and `(T)x` becomes `msl_cast<T>()->*x`.
    """
    out, i, n = [], 0, len(toks)

    def prev_out():
        for t in reversed(out):
            if t.k not in ("ws", "pp"):
                return t
        return None

    def type_at(i):
        """Returns the end and the text of the vector type whose name starts at i, or None."""
        if toks[i].k != "id":
            return None
        j, pre = i, ""
        if toks[j].s == "metal":
            a = next_sig(toks, j)
            if a is not None and toks[a].s == "::":
                b = next_sig(toks, a)
                if b is None:
                    return None
                j, pre = b, "metal::"
        if toks[j].s == "vec" or toks[j].s == "matrix" or toks[j].s in names:
            a = next_sig(toks, j)
            if a is not None and toks[a].s == "<":
                e = match_angle(toks, a)
                if e is None:
                    return None
                return e, pre + txt(fix_vectors(toks[j : j + 1], ())) + txt(toks[j + 1 : e + 1])
            if toks[j].s in ("vec", "matrix"):
                return None
            return j, toks[j].s
        return None

    while i < n:
        t = toks[i]
        if t.k == "id":
            p = prev_out()
            if t.s == "static_cast":
                a = next_sig(toks, i)
                if a is not None and toks[a].s == "<":
                    e = match_angle(toks, a)
                    b = next_sig(toks, a)
                    ty = type_at(b)
                    if e is not None and ty and next_sig(toks, ty[0]) == e:
                        out += [T("id", f"msl_make<{ty[1]}>")]
                        i = e + 1
                        continue
            if p is None or not (
                (p.k == "op" and p.s in (".", "->", "::"))
                or (p.k == "id" and p.s not in KEYW and p.s != "typename")
                or (p.k == "op" and p.s == "~")
            ):
                ty = type_at(i)
                if ty:
                    a = next_sig(toks, ty[0])
                    if a is not None and toks[a].s == "(" and toks[a].k == "op":
                        b = next_sig(toks, a)
                        if toks[b].s not in ("&", "*", "thread", "device", "constant", "threadgroup"):
                            out.append(T("id", f"msl_make<{ty[1]}>"))
                            i = ty[0] + 1
                            continue
                    out += toks[i : ty[0] + 1]
                    i = ty[0] + 1
                    continue
        elif t.k == "op" and t.s == "(":
            p = prev_out()
            if p is None or (p.k == "id" and p.s in KEYW) or (p.k == "op" and p.s not in (")", "]", ">")):
                b = next_sig(toks, i)
                while b is not None and toks[b].k == "id" and toks[b].s in ("const", "thread", "typename"):
                    b = next_sig(toks, b)
                ty = type_at(b) if b is not None else None
                if ty:
                    e = next_sig(toks, ty[0])
                    if e is not None and toks[e].s == ")":
                        x = next_sig(toks, e)
                        if x is not None and (
                            toks[x].k in ("id", "num") or toks[x].s in ("(", "*", "-", "~", "!", "+", "&")
                        ):
                            out.append(T("id", f"msl_cast<{ty[1]}>()->*"))
                            i = e + 1
                            continue
        out.append(t)
        i += 1
    return out


def fn_params(toks):
    """Returns (position, name) of each template parameter that is a function pointer `R (*name)(...)`."""
    s = sig(toks)
    if len(s) < 2 or s[0].s != "template" or s[1].s != "<":
        return []
    res = []
    for k, p in enumerate(split_commas(s[2 : match_angle(s, 1, None, True)])):
        for i in range(len(p) - 3):
            if p[i].s == "(" and p[i + 1].s == "*" and p[i + 2].k == "id" and p[i + 3].s == ")":
                res.append((k, p[i + 2].s))
    return res


def fix_fnptr(toks, takers, made):
    """Turns template parameters that are function pointers into types with a static member call().

    clang adds an address space to the pointee, so no function matches such a parameter. Returns the definitions of the
    types, and the tokens.
    """
    mine = {n for _, n in fn_params(toks)}
    if mine:
        i = next(k for k, t in enumerate(toks) if t.s == "template")
        a = next_sig(toks, i)
        e = match_angle(toks, a, None, True)
        parts = []
        for p in split_commas(toks[a + 1 : e]):
            nm = fn_params([T("id", "template"), T("op", "<"), *p, T("op", ">")])
            parts.append([T("id", "typename"), T("ws", " "), T("id", nm[0][1])] if nm else p)
        hd = []
        for k, p in enumerate(parts):
            hd += ([T("op", ",")] if k else []) + p
        body, out = toks[e:], []
        for k, t in enumerate(body):
            out.append(t)
            n = next_sig(body, k)
            if t.k == "id" and t.s in mine and n is not None and body[n].s == "(":
                out.append(T("id", "::call"))
        toks = toks[: a + 1] + hd + out
    pre, out, i = [], [], 0
    while i < len(toks):
        t = toks[i]
        if t.k == "id" and t.s in takers:
            a = next_sig(toks, i)
            e = match_angle(toks, a) if a is not None and toks[a].s == "<" else None
            if e is not None:
                args = split_commas(toks[a + 1 : e])
                for k in takers[t.s]:
                    if k < len(args):
                        x = sig(args[k])
                        if x and x[0].s == "&":
                            x = x[1:]
                        w = txt(x)
                        if not x or x[0].k != "id" or w in mine:
                            continue
                        fn = "msl_fn_" + re.sub(r"\W+", "_", w)
                        if fn not in made:
                            made.add(fn)
                            pre.append(
                                f"struct {fn} {{ template <class... A> MSL_FN static auto call(A &&...a) "
                                f"{{ return {w}(a...); }} }};\n"
                            )
                        args[k] = [T("id", fn)]
                out += toks[i : a + 1]
                for k, p in enumerate(args):
                    out += ([T("op", ","), T("ws", " ")] if k else []) + p
                i = e
                continue
        out.append(t)
        i += 1
    return lex("".join(pre)), out


AS = {"thread", "device", "constant", "threadgroup", "__private", "__global", "__local", "__constant"}
