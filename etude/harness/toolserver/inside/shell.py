"""A persistent shell made of one bash process per command, each of which loads the saved state and saves its own.

Kept between commands: directory, variables, functions, aliases, `shopt` and harmless `set` options, umask. Not kept:
`set -e`, `-u`, `-x` and similar, traps, file descriptors. So a command can run in the background, be killed or exit
without ending the model's shell, and a fork of the pod continues with the state of its parent.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import locale
else:
    import _locale as locale  # the same functions, without `re`

# Programs must not wait for a key, draw progress bars or colours, or use another locale than tests expect.
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
    "PYTHONUNBUFFERED": "1",  # else prints come after all errors, and a background job seems silent
    "PYTHONDONTWRITEBYTECODE": "1",  # an edit of the same size within a second of a run would be missed
    "TERM": "dumb",
    "COLUMNS": "120",
    "TZ": "UTC",
}
END = ": etude end of state"
MAX_VARIABLE = 100_000  # bytes; the kernel's limit is 128 KiB

# Uses only bash builtins, so that saving starts no process; with `builtin`, as functions and aliases may have the same
# names. `__etude_state` is the state to load, `__etude_left` the file to save to.
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
# Parsed as a whole before any alias or option is set; one line, so that line numbers of the command start at 1.
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
    """The saved state of the shell between commands, in files that every bash loads."""

    def __init__(self, root: str, directory: str) -> None:
        self.root = root
        self.file = os.path.join(directory, "shell")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.environment = {**os.environ, **SETTINGS, "LC_ALL": usable_locale()}
        for name in ("BASH_ENV", "ENV", "OLDPWD", "SHLVL", "_"):
            self.environment.pop(name, None)

    def directory(self) -> str:
        """Return the directory of the next command; the root if it no longer exists."""
        try:
            with open(self.file + ".cwd", "rb") as file:
                root, _, relative = os.fsdecode(file.read(1 << 16)).partition("\0")
        except OSError:
            return self.root
        # A fork may have another root: map paths inside the old root to the new one.
        inside = relative == root or relative.startswith(root.rstrip("/") + "/")
        path = self.root + relative[len(root) :] if inside and root else relative
        return path if os.path.isabs(path) and os.path.isdir(path) and os.access(path, os.X_OK) else self.root

    def command(self, left: str, command: str) -> tuple[list[str], dict[str, str]]:
        """Return argv and environment of a bash that runs the command and saves its state to file `left`.

        The command is passed in the environment: `pkill -f` matches command lines, and a command that kills processes
        by name must not match itself.
        """
        given = {"driver": _DRIVER, "save": _SAVE, "state": self.file, "left": left, "command": command, "file": ""}
        given["names"] = " ".join(n for n in self.environment if n.isascii() and n.isidentifier())
        if len(command.encode()) > MAX_VARIABLE:
            given.update(command="", file=left + ".command")
            with open(given["file"], "w", encoding="utf-8") as file:
                file.write(command)
        environment = {**self.environment, "PWD": self.directory()}
        environment.update((f"__etude_{name}", text) for name, text in given.items())
        return ["bash", "--noprofile", "--norc", "-c", 'eval "$__etude_driver"'], environment

    def adopt(self, left: str) -> None:
        """Adopt the state that a command saved, if it is complete."""
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
            return  # the command was killed, or the disk is full: keep the previous state


def remove_state(left: str) -> None:
    """Remove the state files of a command."""
    for suffix in ("", ".cwd", ".names", ".command"):
        try:
            os.unlink(left + suffix)
        except OSError:
            continue


def usable_locale() -> str:
    """Return C.UTF-8 if the system has it; otherwise bash would print a warning before every command."""
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        return "C.UTF-8"
    except locale.Error:
        return "C"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def missing_reason() -> str:
    """Return why there is no shell, empty if there is one."""
    places = [os.path.join(directory, "bash") for directory in os.get_exec_path()]
    found = any(os.access(place, os.X_OK) and not os.path.isdir(place) for place in places)
    return "" if found else "there is no bash in this image, which the terminal needs"


def describe(code: int) -> str:
    """Describe an exit code in words."""
    import signal

    if code > 128:
        try:
            return f"exit code {code}, {signal.Signals(code - 128).name}"
        except ValueError:
            return f"exit code {code}"
    return f"exit code {code}"
