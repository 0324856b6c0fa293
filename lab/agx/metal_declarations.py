"""Cuts a file of Metal source into its top-level declarations."""

from metal_tokens import CLASSY, OPEN, Err, T, match, match_angle, sig, split_commas, txt, where


class Decl:
    """A top-level declaration."""

    def __init__(self, toks):
        self.toks = toks
        self.names, self.uses, self.keep = set(), set(), False
        self.kernel = self.inst = self.oper = False
        self.kids = None  # the declarations inside a namespace
        self.owner = None  # the class, for a member that is defined outside of its class


def parse(toks, lo, hi):
    out, i = [], lo
    while i < hi:
        t = toks[i]
        if t.k in ("ws", "pp") or t.s == ";":
            d = Decl([t])
            d.keep = True
            out.append(d)
            i += 1
            continue
        # A namespace or an extern "C" block is cut into the declarations inside it.
        s = [j for j in range(i, min(hi, i + 40)) if toks[j].k not in ("ws", "pp")][:8]
        w = [toks[j].s for j in s]
        k = 1 if w[0] == "inline" else 0
        if (len(w) > k and w[k] == "namespace") or (
            w[0] == "extern" and len(w) > 2 and toks[s[1]].k == "str" and w[2] == "{"
        ):
            b = i
            while toks[b].s not in ("{", ";", "="):
                b += 1
            if toks[b].s == "{":
                e = match(toks, b, hi)
                d = Decl(toks[i : e + 1])
                d.kids = parse(toks, b + 1, e)
                d.head, d.tail = toks[i : b + 1], [toks[e]]
                out.append(d)
                i = e + 1
                continue
        e = end_of(toks, i, hi)
        d = Decl(toks[i : e + 1])
        describe(d)
        out.append(d)
        i = e + 1
    return out


def end_of(toks, i, hi):
    j, paren, eq = i, False, False
    while j < hi:
        t = toks[j]
        if t.k == "id":
            if t.s == "template":
                k = j + 1
                while toks[k].k in ("ws", "pp"):
                    k += 1
                if toks[k].s == "<":
                    e = match_angle(toks, k, hi, True)
                    if e is None:
                        raise Err(where(toks, j) + "cannot read a template header: " + txt(toks[j : j + 40]))
                    j = e + 1
                    continue
        elif t.k == "op":
            if t.s == ";":
                return j
            if t.s == "=" and toks[j - 1].s != "operator":
                eq = True
            if t.s in "([":
                e = match(toks, j, hi)
                p = prev_sig(toks, j)
                if t.s == "(" and not (p is not None and toks[p].s in ("__attribute__", "decltype", "alignas")):
                    paren = True
                j = e
            elif t.s == "{":
                e = match(toks, j, hi)
                if paren and not eq:
                    return e
                j = e
        j += 1
    return hi - 1


def prev_sig(toks, i):
    i -= 1
    while i >= 0 and toks[i].k in ("ws", "pp"):
        i -= 1
    return i if i >= 0 else None


def next_sig(toks, i, hi=None):
    i += 1
    hi = len(toks) if hi is None else hi
    while i < hi and toks[i].k in ("ws", "pp"):
        i += 1
    return i if i < hi else None


def describe(d):
    s = sig(d.toks)
    d.uses = {t.s for t in s if t.k == "id"}
    i = 0
    if s and s[0].s == "template":
        if len(s) > 1 and s[1].s == "<":
            while i < len(s) and s[i].s == "template" and s[i + 1].s == "<":
                i = match_angle(s, i + 1, None, True) + 1
        else:
            d.inst = True
            return
    if i < len(s) and s[i].s == "using":
        if s[i + 1].s == "namespace":
            d.keep = True
        elif i + 2 < len(s) and s[i + 2].s == "=":
            d.names.add(s[i + 1].s)
        else:  # using a::b;
            d.names.add([t.s for t in s if t.k == "id"][-1])
        return
    if i < len(s) and s[i].s == "static_assert":
        return
    # `head` collects the tokens before the body or the initializer.
    j, paren_at, classy = i, None, None
    head = []
    while j < len(s):
        t = s[j]
        if t.k == "op" and t.s == "[" and j + 1 < len(s) and s[j + 1].s == "[":
            e = match(s, j)
            if any(x.s == "kernel" for x in s[j:e]):
                d.kernel = True
            j = e + 1
            continue
        if t.k == "id" and t.s in ("__attribute__", "alignas", "decltype") and j + 1 < len(s) and s[j + 1].s == "(":
            j = match(s, j + 1) + 1
            continue
        if t.k == "id" and t.s == "kernel":
            d.kernel = True
        if t.k == "id" and t.s in CLASSY and paren_at is None and classy is None:
            classy = j
        if t.s == "operator" and t.k == "id":
            d.oper = True
        if t.s == "(" and t.k == "op":
            if paren_at is None:
                paren_at = len(head)
            head.append(t)
            j = match(s, j) + 1
            continue
        if t.s == "<" and t.k == "op" and head and head[-1].k == "id":
            e = match_angle(s, j)
            if e is not None:
                head.append(T("tl", ""))
                j = e + 1
                continue
        if t.s in ("{", "=", ";") and t.k == "op":
            break
        head.append(t)
        j += 1
    ids = [t for t in head if t.k == "id"]
    if classy is not None and paren_at is None:
        # The names that a type declares: the type, its enumerators, and variables after the closing brace.
        k = classy + 1
        while k < len(s) and s[k].s in CLASSY:
            k += 1
        while k < len(s) and s[k].s == "[":
            k = match(s, k) + 1
        while k < len(s) and s[k].s == "__attribute__":
            k = match(s, k + 1) + 1
        if k < len(s) and s[k].k == "id":
            d.names.add(s[k].s)
        b = next((q for q in range(k, len(s)) if s[q].s == "{"), None)
        if b is not None:
            e = match(s, b)
            if any(x.s == "enum" for x in s[i:b]):
                d.names |= {x.s for x in s[b:e] if x.k == "id"}
            d.names |= {x.s for x in s[e:] if x.k == "id"}
        elif ids:
            d.names.add(ids[-1].s)
        return
    if paren_at is not None and s[i].s != "typedef":
        pre = [t for t in head[:paren_at] if t.k in ("id", "tl") or t.s == "::"]
        if d.oper:
            return
        while pre and pre[-1].k == "tl":
            pre.pop()
        if pre:
            d.names.add(pre[-1].s)
            if len(pre) >= 3 and pre[-2].s == "::":
                q = [x for x in pre[:-2] if x.k == "id"]
                if q:
                    d.names, d.owner = {q[-1].s}, q[-1].s
        return
    if s[i].s == "typedef":
        depth_ids = []
        k = i
        while k < len(s):
            if s[k].s in OPEN and s[k].k == "op":
                if s[k].s == "(":  # in a typedef of a function pointer, the name is inside the brackets
                    depth_ids += [x for x in s[k : match(s, k)] if x.k == "id"][:1]
                k = match(s, k) + 1
                continue
            if s[k].k == "id":
                depth_ids.append(s[k])
            k += 1
        if depth_ids:
            d.names.add(depth_ids[-1].s)
        return
    if ids:
        # A variable's name is the last identifier before the first square bracket.
        k, last = 0, None
        while k < len(head):
            if head[k].s == "[":
                break
            if head[k].k == "id":
                last = head[k].s
            k += 1
        if last:
            d.names.add(last)


def walk(decls):
    for d in decls:
        yield d
        if d.kids is not None:
            yield from walk(d.kids)


SCAL = ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat"]


VECN = (
    {f"{s}{n}" for s in SCAL for n in (2, 3, 4)}
    | {f"packed_{s}{n}" for s in SCAL for n in (2, 3, 4)}
    | {f"{s}{c}x{r}" for s in ("half", "float", "bfloat") for c in (2, 3, 4) for r in (2, 3, 4)}
)


KEYW = {"return", "else", "case", "do", "throw", "co_return"}


def alias_names(toks):
    """Returns the names of declared types whose definition contains a vector or a template parameter."""
    s = sig(toks)
    known = set(VECN) | {"vec"}
    tparams, pairs = set(), []
    for i, t in enumerate(s):
        if t.k != "id":
            continue
        if t.s == "template" and i + 1 < len(s) and s[i + 1].s == "<":
            e = match_angle(s, i + 1, None, True)
            if e:
                for p in split_commas(s[i + 2 : e]):
                    if p and p[0].s in ("typename", "class") and len(p) > 1 and p[1].k == "id":
                        tparams.add(p[1].s)
        elif t.s == "using" and i + 2 < len(s) and s[i + 2].s == "=":
            e = next(j for j in range(i, len(s)) if s[j].s == ";")
            pairs.append((s[i + 1].s, [x.s for x in s[i + 3 : e]]))
        elif t.s == "typedef":
            e = next((j for j in range(i, len(s)) if s[j].s in (";", "{")), None)
            if e is not None and s[e].s == ";" and s[e - 1].k == "id":
                pairs.append((s[e - 1].s, [x.s for x in s[i + 1 : e - 1]]))
    tparams -= {"F", "Op", "Fn"}
    known |= tparams
    for _ in range(4):
        for n, body in pairs:
            if "*" in body or "&" in body:
                continue
            if any(b in known for b in body):
                known.add(n)
    known.discard("vec")
    return known
