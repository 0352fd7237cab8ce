//! Man pages and completions, from the same definition as the help.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, Result};
use clap::{Arg, Command, CommandFactory};
use clap_mangen::Man;
use source::StateDir;

use crate::args::{Cli, Names};
use crate::failure::Failure;
use crate::jobs::job;

/// Writes a page for the program and one for each command into an existing directory.
pub(crate) fn pages(folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        return Err(Failure::usage(format!(
            "{} is not a directory: create it first, or choose another",
            folder.display()
        ))
        .into());
    }
    let mut program = Cli::command().disable_help_subcommand(true);
    program.build();
    write_pages(&program, folder).with_context(|| format!("cannot write man pages into {}", folder.display()))
}

fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        write_pages(subcommand, folder)?;
    }
    std::fs::write(folder.join(Man::new(command.clone()).get_filename()), page(command)?)
}

/// A page of the generator, except for the synopsis, which names the values of options, and the examples, whose lines
/// are kept.
fn page(command: &Command) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    synopsis(command, &mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|command| !command.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(text) = command.get_after_help() {
        examples(&text.to_string(), &mut page)?;
    }
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}

/// Escapes text for roff.
fn plain(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

fn synopsis(command: &Command, page: &mut Vec<u8>) -> io::Result<()> {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    writeln!(page, ".SH SYNOPSIS\n.HP\n\\fB{}\\fR", plain(name))?;
    let shown = |arg: &&Arg| !arg.is_hide_set();
    for arg in command.get_arguments().filter(shown) {
        writeln!(page, "{}", term(arg))?;
    }
    if command.get_subcommands().any(|command| !command.is_hide_set()) {
        let required = command.is_subcommand_required_set();
        writeln!(page, "{}", if required { "\\fICOMMAND\\fR" } else { "[\\fICOMMAND\\fR]" })?;
    }
    Ok(())
}

/// An argument of a synopsis: `[--method METHOD]`, `SRC`, `IMAGE...`.
fn term(arg: &Arg) -> String {
    let takes = arg.get_action().takes_values();
    let values = || -> String {
        let names = arg.get_value_names().unwrap_or_default();
        let names: Vec<String> = names.iter().map(|name| plain(name)).collect();
        format!("\\fI{}\\fR", names.join(" "))
    };
    let many = matches!(arg.get_action(), clap::ArgAction::Append | clap::ArgAction::Count)
        || (arg.is_positional() && arg.get_num_args().is_some_and(|count| count.max_values() > 1));
    let mut term = match (arg.get_long(), arg.get_short()) {
        (Some(long), _) => format!("\\fB\\-\\-{}\\fR", plain(long)),
        (None, Some(short)) => format!("\\fB\\-{short}\\fR"),
        (None, None) => values(),
    };
    if takes && !arg.is_positional() {
        let optional = arg.get_num_args().is_some_and(|count| count.min_values() == 0);
        term = if optional { format!("{term}[={}]", values()) } else { format!("{term} {}", values()) };
    }
    if !arg.is_required_set() {
        term = format!("[{term}]");
    }
    // Not broken across lines.
    let term = term.replace(' ', "\\ ");
    if many { format!("{term}...") } else { term }
}

/// The text after the help: indented lines are examples.
fn examples(text: &str, page: &mut Vec<u8>) -> io::Result<()> {
    writeln!(page, ".SH EXAMPLES")?;
    let mut within = false;
    for line in text.lines() {
        let heading = matches!(line, "Examples:" | "Example:");
        let example = line.starts_with("  ");
        if example != within {
            writeln!(page, "{}", if example { ".PP\n.nf" } else { ".fi" })?;
            within = example;
        }
        match line {
            _ if heading => {}
            "" => writeln!(page, ".PP")?,
            line => writeln!(page, "{}", plain(line))?,
        }
    }
    if within {
        writeln!(page, ".fi")?;
    }
    Ok(())
}

/// Prints the names of jobs or sources, one a line, for completions.
pub(crate) fn names(what: Names, state: &StateDir) -> Result<()> {
    let names: Vec<String> = match what {
        Names::Jobs => job::known(&job::usual_folder()),
        Names::Sources => {
            let sources = state.survey()?.sources;
            let named = |about: &source::SourceMetadata| [about.name(), about.path.display().to_string()];
            sources.iter().flat_map(|(_, about)| named(about)).collect()
        }
    };
    let _ = writeln!(io::stdout(), "{}", names.join("\n"));
    Ok(())
}

/// What asks for the names of jobs and sources when they are completed, for each shell.
const BASH_NAMES: &str = r#"
_dsync_names() {
    _dsync "$@"
    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" names=
    case "$before:${COMP_WORDS[1]}" in
        --job:*|run:run) names=$(dsync names jobs 2>/dev/null) ;;
        *:sync|*:mirror|*:verify|*:demote|*:status|*:checkpoint|*:changes|*:extract|*:forget)
            [[ $current == -* ]] || names=$(dsync names sources 2>/dev/null) ;;
    esac
    COMPREPLY+=($(compgen -W "$names" -- "$current"))
}
complete -F _dsync_names -o nosort -o bashdefault -o default dsync
"#;
const ZSH_NAMES: &str = r#"
_dsync_jobs() { local -a names=(${(f)"$(dsync names jobs 2>/dev/null)"}); compadd -a names }
_dsync_sources() { local -a names=(${(f)"$(dsync names sources 2>/dev/null)"}); compadd -a names; _files }
"#;
const FISH_NAMES: &str = r#"
complete -c dsync -n "__fish_seen_subcommand_from run" -f -a "(dsync names jobs 2>/dev/null)"
complete -c dsync -n "__fish_seen_subcommand_from demote promote rewind verify" -l job -x -a "(dsync names jobs 2>/dev/null)"
complete -c dsync -n "__fish_seen_subcommand_from sync mirror verify demote status checkpoint changes extract forget" -a "(dsync names sources 2>/dev/null)"
"#;

/// A completion that asks for names too.
fn with_names(shell: clap_complete::Shell, text: &str) -> String {
    use clap_complete::Shell;
    match shell {
        Shell::Bash => format!("{text}{BASH_NAMES}"),
        Shell::Fish => format!("{text}{FISH_NAMES}"),
        Shell::Zsh => {
            let (head, rest) = text.split_once('\n').unwrap_or((text, ""));
            let line = |line: &str| match line {
                _ if line.contains("]:JOB:") || line.starts_with("':job") => {
                    line.replace(":_default'", ":_dsync_jobs'")
                }
                _ if line.starts_with("':source") || line.starts_with("'::source") => {
                    line.replace(":_default'", ":_dsync_sources'")
                }
                _ => line.to_owned(),
            };
            let lines: Vec<String> = rest.lines().map(line).collect();
            format!("{head}\n{ZSH_NAMES}{}\n", lines.join("\n"))
        }
        _ => text.to_owned(),
    }
}

/// Writes the completions for a shell to standard output, without hidden commands.
pub(crate) fn completions(shell: clap_complete::Shell) {
    // Through memory: the generator panics if the reader is gone.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut visible(&Cli::command()), "dsync", &mut text);
    let text = with_names(shell, &String::from_utf8_lossy(&text));
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// A command without what its help hides.
fn visible(command: &Command) -> Command {
    // Leaked: the program ends after this.
    let name: &'static str = Box::leak(command.get_name().to_owned().into_boxed_str());
    let shown = Command::new(name).about(command.get_about().cloned().unwrap_or_default());
    let shown =
        if command.get_version().is_some() { shown.version(env!("CARGO_PKG_VERSION")) } else { shown };
    let shown = shown.args(command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned());
    shown.subcommands(command.get_subcommands().filter(|command| !command.is_hide_set()).map(visible))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Command {
        let mut program = Cli::command().disable_help_subcommand(true);
        program.build();
        program
    }

    fn page_of(name: &str) -> String {
        let program = program();
        let command = program.get_subcommands().find(|command| command.get_name() == name).unwrap();
        String::from_utf8(page(command).unwrap()).unwrap()
    }

    #[test]
    fn what_the_help_hides_is_not_completed() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut visible(&Cli::command()), "dsync", &mut text);
            let text = String::from_utf8(text).unwrap();
            for shown in ["--method", "journal-dir", "timeout", "mirror", "restore", "--state-dir"] {
                let shown =
                    if shell == clap_complete::Shell::Fish { shown.trim_start_matches('-') } else { shown };
                assert!(text.contains(shown), "{shell}: {shown}");
            }
            for hidden in ["cycles", "fixed-interval", "stages", "completions"] {
                assert!(!text.contains(hidden), "{shell}: {hidden}");
            }
            let text = with_names(shell, &text);
            for asked in ["names jobs", "names sources"] {
                assert!(text.contains(asked), "{shell}: {asked}");
            }
            if shell == clap_complete::Shell::Zsh {
                assert!(text.starts_with("#compdef dsync\n"), "{text}");
                assert!(
                    text.matches(":_dsync_jobs'").count() >= 5
                        && text.matches(":_dsync_sources'").count() >= 4,
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn a_page_names_values_and_keeps_the_lines_of_examples() {
        let page = page_of("sync");
        let synopsis = page.split(".SH ").find(|section| section.starts_with("SYNOPSIS")).unwrap();
        for term in [
            "[\\fB\\-\\-method\\fR\\ \\fIMETHOD\\fR]",
            "[\\fB\\-\\-compress\\fR[=\\fILEVEL\\fR]]",
            "[\\fB\\-\\-dry\\-run\\fR]",
            "\n\\fI[[USER@]HOST:]SRC\\fR\n",
        ] {
            assert!(synopsis.contains(term), "{term}: {synopsis}");
        }
        assert!(!page.contains("cycles"), "{page}");
        let examples = page.split(".SH ").find(|section| section.starts_with("EXAMPLES")).unwrap();
        let lines = ".nf\n  dsync sync /srv/vm.raw /backup/vm.raw\n      on this host\n  dsync sync vm ";
        assert!(examples.contains(lines), "{examples}");
        assert_eq!(examples.matches(".nf\n").count(), examples.matches(".fi\n").count());
    }

    /// All commands, those of `key` and `track` too.
    fn commands(command: &Command) -> Vec<&Command> {
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
        std::iter::once(command).chain(shown.flat_map(commands)).collect()
    }

    #[test]
    fn help_fits_a_terminal_of_80_columns() {
        for command in commands(&program()) {
            let help = command.clone().term_width(80).render_long_help().to_string();
            let wide: Vec<&str> = help.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(wide.is_empty(), "{}: {wide:#?}", command.get_name());
            // An example is a line to paste, and a text has its lines from the terminal's width.
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let mut before = "";
            for line in after.lines() {
                assert!(!line.starts_with("  ") || line.chars().count() <= 80, "{line}");
                let is_text = |line: &str| !line.is_empty() && !line.starts_with("  ");
                assert!(!(is_text(before) && is_text(line)), "{before}\n{line}");
                before = line;
            }
        }
    }

    #[test]
    fn options_stand_under_headings() {
        let orders = [
            "Arguments:",
            "Options:",
            "Method:",
            "What is kept:",
            "Limits:",
            "Remote:",
            "Advanced:",
            "Global options:",
        ];
        for name in ["sync", "mirror", "verify", "demote", "serve"] {
            let program = program();
            let command = program.get_subcommands().find(|command| command.get_name() == name).unwrap();
            let help = command.clone().render_help().to_string();
            let found: Vec<_> = orders.iter().map(|heading| help.find(&format!("\n{heading}"))).collect();
            let at: Vec<usize> = found.iter().flatten().copied().collect();
            assert!(at.is_sorted() && at.len() >= 5, "{name}: {help}");
            assert!(name != "sync" || at.len() == orders.len(), "{help}");
            let own =
                help.split("\nMethod:").next().and_then(|all| all.split("\nOptions:").nth(1)).unwrap_or("");
            assert!(
                name != "sync" || own.matches("\n  -").count() + own.matches("\n      --").count() <= 4,
                "{own}"
            );
            for hidden in ["--alpha", "--beta", "--interval", "--min-interval", "--passes", "--at-view"] {
                assert!(!help.contains(hidden), "{name}: {hidden}");
            }
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_not_made() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("sync");
        assert!(pages(&missing).unwrap_err().to_string().contains("not a directory"));
        assert!(!missing.exists());
        pages(folder.path()).unwrap();
        for name in ["dsync.1", "dsync-sync.1", "dsync-key-trust.1"] {
            assert!(folder.path().join(name).exists(), "{name}");
        }
    }
}
