"""``localkv completion``: the script that teaches a shell to complete localkv's commands."""

from __future__ import annotations

import click


@click.command("completion", epilog='Example: eval "$(localkv completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands, options and model names in SHELL.

    \b
    bash  add to ~/.bashrc:               eval "$(localkv completion bash)"
    zsh   add to ~/.zshrc after compinit: eval "$(localkv completion zsh)"
    fish  localkv completion fish > ~/.config/fish/completions/localkv.fish
    """
    from click.shell_completion import get_completion_class

    import localkv.cli.shells  # noqa: F401 (makes its classes known to click)
    from localkv.cli.app import cli

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    click.echo(shell_class(cli, {}, "localkv", "_LOCALKV_COMPLETE").source(), nl=False)
