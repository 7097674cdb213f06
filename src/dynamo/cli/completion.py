"""Shell completion: the script for each shell, and its installation for the user.

The script completes `dynamo …` and `python -m dynamo.x …`. It asks the program itself, by argcomplete's protocol
(`base.config`), so that it never goes out of date.
"""

from pathlib import Path

from argcomplete import shell_integration

from dynamo.base import errors

SHELLS = ("bash", "zsh", "fish")
_LINE_BY_SHELL = {  # what a shell's start file gets: path, line
    "bash": (".bashrc", "source '{script}'"),
    "zsh": (".zshrc", "autoload -Uz compinit; compinit; source '{script}'"),
}
_SCRIPT_BY_SHELL = {
    "bash": ".bash_completions/dynamo.sh",
    "zsh": ".zfunc/dynamo.zsh",
    "fish": ".config/fish/completions/dynamo.fish",
}
# Follows argcomplete's own script and uses its __python_argcomplete_run. Other modules complete by files, as before.
_PYTHON_BASH = r"""
_dynamo_python_module() {
    local IFS=$'\013'
    if [[ "${COMP_WORDS[1]}" == -m && $COMP_CWORD -gt 2 && "${COMP_WORDS[2]}" == dynamo.* ]]; then
        COMPREPLY=($(IFS="$IFS" COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_TYPE="$COMP_TYPE" \
            _ARGCOMPLETE_COMP_WORDBREAKS="$COMP_WORDBREAKS" _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=bash \
            _ARGCOMPLETE_SUPPRESS_SPACE=1 __python_argcomplete_run "$1" -m "${COMP_WORDS[2]}"))
    fi
}
complete -o default -o bashdefault -F _dynamo_python_module python python3
"""
_PYTHON_ZSH = r"""
_dynamo_python_module() {
    if [[ "${words[2]}" == -m && $CURRENT -gt 3 && "${words[3]}" == dynamo.* ]]; then
        local IFS=$'\013'
        local completions
        completions=($(IFS="$IFS" COMP_LINE="$BUFFER" COMP_POINT="$CURSOR" _ARGCOMPLETE=3 \
            _ARGCOMPLETE_SHELL=zsh _ARGCOMPLETE_SUPPRESS_SPACE=1 \
            __python_argcomplete_run "${words[1]}" -m "${words[3]}"))
        _describe "${words[3]}" completions
    else
        _files
    fi
}
compdef _dynamo_python_module python python3
"""
_PYTHON_BY_SHELL = {"bash": _PYTHON_BASH, "zsh": _PYTHON_ZSH}


def detect_shell(environ: dict[str, str]) -> str:
    """Return the name of the user's shell. Raises ConfigError if completion does not support it."""
    return check_shell(Path(environ.get("SHELL", "")).name)


def check_shell(name: str) -> str:
    """Return the name of a supported shell. Raises ConfigError for another one."""
    if name not in SHELLS:
        raise errors.ConfigError(
            f"expected one of the shells {', '.join(SHELLS)}, got {name or 'none'}: name one,"
            " as in --show-completion bash"
        )
    return name


def script(shell: str) -> str:
    """Return the script that a shell sources."""
    text: str = shell_integration.shellcode(["dynamo"], shell=shell)
    return text + _PYTHON_BY_SHELL.get(shell, "")


def install(shell: str, home: Path) -> Path:
    """Write the script into the user's home and source it from the shell's start file, once; return the script's path.

    Raises ConfigError if a file cannot be written.
    """
    path = home / _SCRIPT_BY_SHELL[shell]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script(shell))
        if shell in _LINE_BY_SHELL:
            name, line = _LINE_BY_SHELL[shell]
            start_file = home / name
            line = line.format(script=path)
            content = start_file.read_bytes() if start_file.exists() else b""
            if line.encode() not in content.splitlines():
                with start_file.open("ab") as file:
                    before = b"\n" if content and not content.endswith(b"\n") else b""
                    file.write(before + line.encode() + b"\n")
    except OSError as error:
        raise errors.ConfigError(
            f"{error.filename}: cannot be written: {error.strerror}"
        ) from error
    return path
