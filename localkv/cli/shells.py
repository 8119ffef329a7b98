"""Completion in bash, zsh and fish: what click leaves open. Loaded only while completing.

Click's own script for bash takes the words as bash splits them, at every colon, and drops all names
as soon as files may follow. The one here looks at the line itself, since ``ollama:NAME:TAG`` is one
word, and offers names and files side by side. In zsh and fish a value behind ``--option=`` would
replace the option as well; here it comes with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

_BASH = """\
%(complete_func)s() {
    local value breaks=$COMP_WORDBREAKS quoted=
    case ${COMP_WORDS[COMP_CWORD]} in
        \\"*|\\'*) quoted=1 breaks= ;;
    esac
    COMPREPLY=()
    while IFS= read -r value; do
        [[ -z $value ]] && continue
        [[ $value == */ ]] && compopt -o nospace
        if [[ -z $quoted ]]; then
            printf -v value %%q "$value"
            value=${value/#\\\\~/\\~}
        fi
        COMPREPLY+=("$value")
    done < <(env COMP_WORDS="${COMP_LINE:0:$COMP_POINT}" COMP_WORDBREAKS="$breaks" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class WholeWordBash(BashComplete):
    """Bash, with words as the command will get them."""

    name = "bash"
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one at the cursor, and that one."""
        # A letter at the end makes the last word one, whatever quotes or spaces come before.
        words = split_arg_string(os.environ["COMP_WORDS"] + "x")
        return words[1:-1], words[-1][:-1]

    def complete(self) -> str:
        """Return one value per line, without what bash does not take for part of the word."""
        args, incomplete = self.get_completion_args()
        lines = [
            value
            for item in self.get_completions(args, incomplete)
            for value in (_paths(item) if item.type in ("file", "dir") else [item.value])
        ]
        typed = incomplete.partition("=")[2] if incomplete.startswith("--") else incomplete
        if ":" in typed and ":" in os.environ.get("COMP_WORDBREAKS", ""):
            before = typed[: typed.rindex(":") + 1]
            lines = [value.removeprefix(before) for value in lines]
        return "\n".join(lines)


class _WithOption:
    """Gives a value behind ``--option=`` together with the option, as zsh and fish want it."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return the items, each as the whole word that it makes."""
        found: list[CompletionItem] = super().get_completions(args, incomplete)  # type: ignore[misc]
        option, sign, _ = incomplete.partition("=")
        if not sign or not option.startswith("--"):
            return found
        return [
            CompletionItem(f"{option}={item.value}", help=item.help)
            for item in found
            if item.type == "plain"
        ]


class WholeWordZsh(_WithOption, ZshComplete):
    """Zsh with click's own script."""


class WholeWordFish(_WithOption, FishComplete):
    """Fish with click's own script."""


for _class in (WholeWordBash, WholeWordZsh, WholeWordFish):
    add_completion_class(_class)


def model_items(incomplete: str) -> list[CompletionItem]:
    """Return the names of models that begin with ``incomplete``, then .gguf files."""
    from localkv.gguf.demo import DEMOS
    from localkv.gguf.places import places
    from localkv.gguf.stores import model_names

    found = [
        CompletionItem(name, help=DEMOS[name].title if name in DEMOS else None)
        for name in model_names(places())
        if _fits(name, incomplete)
    ]
    return [*found, CompletionItem(incomplete, type="file", ending=".gguf")]


def run_items(incomplete: str) -> list[CompletionItem]:
    """Return an item that stands for the folders that begin with ``incomplete``."""
    return [CompletionItem(incomplete, type="dir")]


def _fits(name: str, incomplete: str) -> bool:
    # A name with a line break would be two answers.
    return name.startswith(incomplete) and name.isprintable()


def _paths(item: CompletionItem) -> Iterator[str]:
    """Yield what lies in the folder of a file item's value: folders, and files of its ending."""
    folder, start = os.path.split(item.value)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda e: e.name)
    except OSError:
        return
    for entry in entries:
        name = entry.name
        hidden = name.startswith(".") and not start.startswith(".")
        if hidden or not _fits(name, start):
            continue
        path = os.path.join(folder, name)
        if entry.is_dir():
            yield f"{path}/"
        elif item.type == "file" and name.endswith(item.ending or ""):
            yield path
