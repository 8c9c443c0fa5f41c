//! `ubtrfs generate`, for packagers: man pages and shell completions, from the same definitions
//! as the help.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli;
use crate::commands::help;
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;

/// Write man pages and shell completions
#[derive(clap::Args)]
pub struct Args {
    /// What to write
    #[arg(value_enum)]
    what: What,
    /// The directory to write into; made if missing
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Man pages, one a command
    Man,
    /// Completions for bash, elvish, fish, PowerShell and zsh
    Completions,
}

/// Writes the files and lists them.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    fs::create_dir_all(&args.directory)
        .map_err(|error| Failure::io("making a directory", &error).at_path(&args.directory))?;
    match args.what {
        What::Man => man_pages(&args.directory, out)?,
        What::Completions => completions(&args.directory, out)?,
    }
    Ok(Exit::Done)
}

fn completions(directory: &Path, out: &mut Output) -> Result<()> {
    for shell in Shell::value_variants() {
        let mut text = Vec::new();
        clap_complete::generate(*shell, &mut cli::definition(), "ubtrfs", &mut text);
        let name = match shell {
            Shell::Bash => "ubtrfs.bash".to_owned(),
            Shell::Fish => "ubtrfs.fish".to_owned(),
            Shell::Zsh => "_ubtrfs".to_owned(),
            Shell::PowerShell => "ubtrfs.ps1".to_owned(),
            other => format!("ubtrfs.{other}"),
        };
        write(&directory.join(name), &text, out)?;
    }
    Ok(())
}

fn man_pages(directory: &Path, out: &mut Output) -> Result<()> {
    let mut root = cli::definition();
    root.build();
    page(&root, "ubtrfs".to_owned(), directory, out)
}

fn page(command: &clap::Command, name: String, directory: &Path, out: &mut Output) -> Result<()> {
    // A page's title is the whole path of words, as `man git-log` has it.
    let titled = command.clone().display_name(name.clone());
    let mut text = Vec::new();
    render(&titled, name == "ubtrfs", &mut text)
        .map_err(|error| Failure::io("writing a man page", &error))?;
    write(&directory.join(format!("{name}.1")), &text, out)?;
    for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
        page(child, format!("{name}-{}", child.get_name()), directory, out)?;
    }
    Ok(())
}

fn render(command: &clap::Command, is_root: bool, text: &mut Vec<u8>) -> std::io::Result<()> {
    let after = command.get_after_help().map(ToString::to_string);
    let man = Man::new(command.clone().after_help("").after_long_help(""))
        .title(command.get_display_name().unwrap_or("ubtrfs").to_uppercase())
        .source(concat!("ubtrfs ", env!("CARGO_PKG_VERSION")))
        .manual("ubtrfs manual")
        .date("");
    man.render_title(text)?;
    man.render_name_section(text)?;
    man.render_synopsis_section(text)?;
    man.render_description_section(text)?;
    man.render_options_section(text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(text)?;
    }
    if let Some(after) = after {
        let body = after.strip_prefix("Examples:\n").unwrap_or(&after);
        section(text, "EXAMPLES", body);
    }
    if is_root {
        for topic in &help::TOPICS {
            section(text, &topic.name.to_uppercase().replace('-', " "), &topic.text());
        }
    } else {
        section(
            text,
            "EXIT STATUS",
            "As in ubtrfs(1): 0 done, 1 the answer is no, 2 usage, 3 damage,\n4 input or output, 5 no space, 6 not supported.\n",
        );
        section(text, "SEE ALSO", "ubtrfs(1)\n");
    }
    Ok(())
}

/// Text as it stands, lines kept.
fn section(page: &mut Vec<u8>, title: &str, body: &str) {
    let mut text = format!(".SH \"{title}\"\n.nf\n");
    for line in body.lines() {
        let line = line.replace('\\', "\\\\").replace('-', "\\-");
        if line.starts_with(['.', '\'']) {
            text.push_str("\\&");
        }
        text.push_str(&line);
        text.push('\n');
    }
    text.push_str(".fi\n");
    page.extend_from_slice(text.as_bytes());
}

fn write(path: &Path, bytes: &[u8], out: &mut Output) -> Result<()> {
    fs::write(path, bytes).map_err(|error| Failure::io("writing", &error).at_path(path))?;
    out.line(&path.display().to_string())
}
