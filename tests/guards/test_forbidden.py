"""What must not occur in the product: loaders that run code, and clients that fetch."""

import ast

_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "requests", "httpx", "aiohttp", "urllib3"}
_CALLS = {"eval", "exec", "compile", "__import__"}
_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "fork")}
#: The parent asks its own server whether it is ready; the demo speaks to the server it started itself; explain-miss to
#: the one that its user names.
_HTTP_CLIENT = {"hybserve.launch.serve", "hybserve.launch.demo", "hybserve.explain"}
#: Its children run Triton's compiler and end; they are forked while the engine does nothing else.
_FORKS = {"hybserve_kernels.compiling"}


def test_F38_nothing_is_unpickled_evaluated_or_fetched(sources):
    wrong = []
    for source in sources:
        for name, line in source.imports():
            top = name.split(".")[0]
            fetches = name.startswith(("urllib.request", "http.client")) and source.module not in _HTTP_CLIENT
            if top in _MODULES or fetches:
                wrong.append(f"{source.path}:{line}: import {name}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
                wrong.append(f"{source.path}:{node.lineno}: {node.func.id}()")
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in _ATTRIBUTES
                and not (node.attr == "fork" and source.module in _FORKS)
            ):
                wrong.append(f"{source.path}:{node.lineno}: {node.value.id}.{node.attr}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                wrong.append(f"{source.path}:{node.value.lineno}: trust_remote_code")
    assert not wrong, "\n".join(wrong)


def test_no_exception_is_swallowed_whole(sources):
    """``except:`` or ``except Exception: pass`` hides faults; narrow ones say what they expect."""
    wrong = []
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if broad and all(isinstance(part, ast.Pass | ast.Continue) for part in node.body):
                wrong.append(f"{source.path}:{node.lineno}")
    assert not wrong, "\n".join(wrong)
