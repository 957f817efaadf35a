"""A shell that remembers, made of shells that do not stay: each command has a bash of its own, which begins with what
the last one left and writes down what it leaves.

What lasts: the directory, variables, functions, aliases, `shopt` and harmless `set` options, the umask. What ends with
its command: `set -e`, `-u`, `-x` and the like, traps, file descriptors. So a command can go on in the background, be
killed or end its shell without taking the shell from the model; and a fork of the pod begins where its parent was.
"""

from __future__ import annotations

import os
import re
import shutil

# Nothing may wait for a key, draw bars or colours, or speak another language than the tests of a project expect.
SETTINGS = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "true",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "TQDM_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",  # otherwise prints come after all errors, and a job in the background seems silent
    "PYTHONDONTWRITEBYTECODE": "1",  # an edit within the second of a run, of the same size, would not be seen
    "TERM": "dumb",
    "COLUMNS": "120",
    "TZ": "UTC",
}
END = ": etude end of state"
MAX_VARIABLE = 100_000  # bytes; the kernel takes 128 KiB

# In parts of bash itself, so that saving starts no process; as `builtin`, for there may be functions and aliases of the
# same names. `__etude_state` is the state to begin with, `__etude_left` the one to leave.
_SAVE = r"""
{
builtin shopt -p autocd cdable_vars cdspell dotglob expand_aliases extglob failglob globstar
builtin shopt -p lastpipe nocaseglob nocasematch nullglob sourcepath xpg_echo
builtin compgen -v >| "$__etude_left.names"; builtin mapfile -t __etude_all < "$__etude_left.names"
for __etude_name in "${__etude_all[@]}"; do
  case $__etude_name in
    __etude*|_|BASH|BASHOPTS|BASHPID|BASH_ALIASES|BASH_ARGC|BASH_ARGV|BASH_ARGV0|BASH_CMDS|BASH_COMMAND) ;;
    BASH_EXECUTION_STRING|BASH_LINENO|BASH_REMATCH|BASH_SOURCE|BASH_SUBSHELL|BASH_VERSINFO|BASH_VERSION) ;;
    BASH_COMPAT|COMP_*|DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTIND) ;;
    PIPESTATUS|PPID|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID) ;;
    *) [[ ${__etude_base[$__etude_name]+set} && ${!__etude_name-} == "${__etude_base[$__etude_name]}" ]] ||
         builtin declare -p "$__etude_name" ;;
  esac
done
for __etude_name in "${!__etude_base[@]}"; do
  [[ ${!__etude_name+set} ]] || builtin echo "unset -v $__etude_name"
done
builtin declare -f
builtin declare -Fx
builtin shopt -po allexport braceexpand keyword noclobber noglob physical pipefail
builtin umask -p
builtin alias -p
builtin echo "{end}"
} >| "$__etude_left"
builtin printf %s "$PWD" >| "$__etude_left.cwd"
""".replace("{end}", END)
# Parsed as a whole before any alias or option is set; in one line, so that those of the command are counted from 1.
_DRIVER = r"""{
export -n "${!__etude@}"; declare -A __etude_base=();
for __etude_name in $__etude_names; do __etude_base[$__etude_name]=${!__etude_name}; done;
if [[ $__etude_file ]]; then IFS= read -r -d '' __etude_command < "$__etude_file"; fi;
shopt -s expand_aliases;
{ [[ -f $__etude_state ]] && . "$__etude_state"; } 2>/dev/null;
builtin trap '{ [[ ${__etude_saved-} ]] || { builtin set +eux; builtin eval "$__etude_save"; }; } 2>/dev/null' EXIT;
builtin eval "$__etude_command";
{ __etude_code=$?; builtin set +eux; builtin eval "$__etude_save"; __etude_saved=1; } 2>/dev/null;
builtin exit "$__etude_code";
}""".replace("\n", " ")


class ShellState:
    """Where the shell is between commands: files of ours that every bash begins with."""

    def __init__(self, root: str, directory: str) -> None:
        self.root = root
        self.file = os.path.join(directory, "shell")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.environment = {**os.environ, **SETTINGS, "LC_ALL": usable_locale()}
        for name in ("BASH_ENV", "ENV", "OLDPWD", "SHLVL", "_"):
            self.environment.pop(name, None)

    def directory(self) -> str:
        """Where the next command begins; the root if that is gone."""
        try:
            with open(self.file + ".cwd", "rb") as file:
                root, _, relative = os.fsdecode(file.read(1 << 16)).partition("\0")
        except OSError:
            return self.root
        # A fork may have another root: what was inside the old one is inside the new one.
        inside = relative == root or relative.startswith(root.rstrip("/") + "/")
        path = self.root + relative[len(root) :] if inside and root else relative
        return path if os.path.isabs(path) and os.path.isdir(path) and os.access(path, os.X_OK) else self.root

    def command(self, left: str, command: str) -> tuple[list[str], dict[str, str]]:
        """The program that runs the command, and leaves its state in file `left`; and its environment.

        All that differs is in the environment: what is in a command line is what `pkill -f` looks at, and a command
        that ends processes by their names must not find its own.
        """
        given = {"driver": _DRIVER, "save": _SAVE, "state": self.file, "left": left, "command": command, "file": ""}
        given["names"] = " ".join(n for n in self.environment if re.fullmatch(r"[A-Za-z_]\w*", n, re.ASCII))
        if len(command.encode()) > MAX_VARIABLE:
            given.update(command="", file=left + ".command")
            with open(given["file"], "w", encoding="utf-8") as file:
                file.write(command)
        environment = {**self.environment, "PWD": self.directory()}
        environment.update((f"__etude_{name}", text) for name, text in given.items())
        return ["bash", "--noprofile", "--norc", "-c", 'eval "$__etude_driver"'], environment

    def take(self, left: str) -> None:
        """Go on from what a command left, if it left all of it."""
        try:
            with open(left, "rb") as file:
                file.seek(max(0, os.path.getsize(left) - len(END) - 1))
                whole = file.read() == END.encode() + b"\n"
            with open(left + ".cwd", "rb") as file:
                where = file.read(1 << 16)
            if whole and where:
                with open(self.file + ".cwd.new", "wb") as out:
                    out.write(os.fsencode(self.root) + b"\0" + where)
                os.rename(left, self.file)
                os.rename(self.file + ".cwd.new", self.file + ".cwd")
        except OSError:
            return  # a command that was killed, or a full disk: the shell stays where it was


def forget(left: str) -> None:
    """Remove what a command left."""
    for suffix in ("", ".cwd", ".names", ".command"):
        try:
            os.unlink(left + suffix)
        except OSError:
            continue


def usable_locale() -> str:
    """UTF-8 without a language, where the system has it; otherwise bash would complain before every command."""
    import locale

    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        return "C.UTF-8"
    except locale.Error:
        return "C"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def missing() -> str:
    """Why there can be no shell here; nothing if there can."""
    return "" if shutil.which("bash") else "there is no bash in this image, which the terminal needs"


def describe(code: int) -> str:
    """An exit code in words."""
    import signal

    if code > 128:
        try:
            return f"exit code {code}, {signal.Signals(code - 128).name}"
        except ValueError:
            return f"exit code {code}"
    return f"exit code {code}"
