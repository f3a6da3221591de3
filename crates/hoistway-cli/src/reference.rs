//! The page of all options, `docs/options.md`, which is written from what can be typed.

use crate::arguments::{Arguments, EXIT_CODES};
use clap::{Arg, Command, CommandFactory};
use std::{env, fs, path::Path};

const HEAD: &str = "\
# Options, variables, exit codes

This page is written from the command's help by `just options`, and a test compares them.

Options that say where tensors go and how bytes come have one name everywhere: `--in-flight 64MiB`,
`hoistway.load_file(…, in_flight=\"64MiB\")`, `HOISTWAY_IN_FLIGHT=64MiB`. A flag or an argument wins over the variable. `hoistway COMMAND
--help` has examples.
";

/// Variables that are not those of one option of `load`.
const OTHER_VARIABLES: &str = "\
## Other variables

| variable | meaning |
|---|---|
| `HOISTWAY_CACHE` | directory that keeps what is read from object stores: [the node's cache](objects.md#the-nodes-cache) |
| `HOISTWAY_CACHE_BYTES` | its size limit, such as `200GiB`; by default what leaves a tenth of the drive free |
| `HOISTWAY_DIRECTSTORAGE_DIR` | directory of the [libraries of DirectStorage](windows.md#directstorage) |
| `HOISTWAY_LOG` | what is logged, such as `debug` or `hoistway_kv=trace,warn` |
| `HOISTWAY_REPORT` | `1`: a Python process writes [one line about all its loads](report.md#all-loads-of-a-program) as it ends |
| `HOISTWAY_SAFETENSORS` | `1`: set by `hoistway run`, so that Python processes use the [drop-in](safetensors.md) |

A variable whose name is nearly one of these is warned of.
";

/// What `--json` prints.
const JSON: &str = "\
## JSON

With `--json` a command prints one object, whose `format_version` is 1. Fields that are added do not change that number; it grows when a
field goes or means something else. Each command has a schema ([JSON Schema](https://json-schema.org), draft 2020-12), which a test compares
with what the command prints:

| command | schema |
|---|---|
| `hoistway load` | [load.json](schemas/load.json): the [report](report.md) |
| `hoistway inspect` | [inspect.json](schemas/inspect.json) |
| `hoistway verify` | [verify.json](schemas/verify.json): the manifest |
| `hoistway warm` | [warm.json](schemas/warm.json) |
| `hoistway doctor` | [doctor.json](schemas/doctor.json) |
| `hoistway cache stat`, `ls`, `verify`, `gc`, `warm` | [cache-stat.json](schemas/cache-stat.json), [cache-ls.json](schemas/cache-ls.json), [cache-verify.json](schemas/cache-verify.json), [cache-gc.json](schemas/cache-gc.json), [cache-warm.json](schemas/cache-warm.json) |
| `hoistway kv stat`, `ls`, `verify`, `gc`, `bench` | [kv-stat.json](schemas/kv-stat.json), [kv-ls.json](schemas/kv-ls.json), [kv-verify.json](schemas/kv-verify.json), [kv-gc.json](schemas/kv-gc.json), [kv-bench.json](schemas/kv-bench.json) |
| `hoistway moe plan`, `pack`, `replay` | [moe-plan.json](schemas/moe-plan.json), [moe-pack.json](schemas/moe-pack.json), [moe-replay.json](schemas/moe-replay.json) |
| `hoistway bench read`, `headers` | [bench-read.json](schemas/bench-read.json), [bench-headers.json](schemas/bench-headers.json) |

A command that fails prints its error to standard error and ends with an exit code below. `doctor`, `verify`, `cache warm` and the commands of `kv`
may have printed their object before that.
";

#[test]
fn the_page_of_options_is_what_can_be_typed() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/options.md");
    let now = reference();
    if env::var_os("HOISTWAY_UPDATE_OPTIONS").is_some() {
        fs::write(&page, &now).unwrap();
    }
    let written = fs::read_to_string(&page).unwrap_or_default();
    assert!(written == now, "the options have changed: run 'just options' to write docs/options.md again");
}

fn reference() -> String {
    let mut command = Arguments::command();
    command.build();
    let codes = EXIT_CODES.lines().filter_map(|line| line.strip_prefix("  ")?.split_once("  "));
    let codes = codes.filter(|(code, _)| code.parse::<u8>().is_ok());
    let codes: String = codes.map(|(code, meaning)| format!("| {code} | {meaning} |\n")).collect();
    let mut page = HEAD.to_owned();
    add_subcommands(&command, "hoistway", &mut page);
    page + &format!("\n{OTHER_VARIABLES}\n{JSON}\n## Exit codes\n\n| code | meaning |\n|---|---|\n{codes}")
}

fn add_subcommands(command: &Command, before: &str, page: &mut String) {
    let shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    for subcommand in shown.filter(|subcommand| subcommand.get_name() != "help") {
        let path = format!("{before} {}", subcommand.get_name());
        let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
        *page += &format!("\n## `{path}`\n{about}.\n");
        let listed = |argument: &&Arg| !matches!(argument.get_id().as_str(), "help" | "version");
        let rows: String = subcommand.get_arguments().filter(listed).map(row).collect();
        if !rows.is_empty() {
            *page += &format!("\n| option | variable | meaning |\n|---|---|---|\n{rows}");
        }
        add_subcommands(subcommand, &path, page);
    }
}

/// The row of an option or argument.
fn row(argument: &Arg) -> String {
    let names: Vec<String> =
        argument.get_value_names().into_iter().flatten().map(ToString::to_string).collect();
    let value = if argument.get_action().takes_values() { names.join(" ") } else { String::new() };
    let typed = match argument.get_long() {
        Some(long) => format!("--{long} {value}"),
        None => value,
    };
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let (help, variable) = without_variable(&help);
    let parts = help.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    let mut meaning = parts.collect::<Vec<_>>().join("<br>");
    let defaults: Vec<_> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        meaning += &format!(" [default: {}]", defaults.join(","));
    }
    if !argument.is_hide_possible_values_set() {
        let values = argument.get_possible_values();
        let values: Vec<&str> = values.iter().map(clap::builder::PossibleValue::get_name).collect();
        if argument.get_action().takes_values() && !values.is_empty() {
            meaning += &format!(" (values: {})", values.join(", "));
        }
    }
    let variable = variable.map(|name| format!("`{name}`")).unwrap_or_default();
    format!("| `{}` | {variable} | {} |\n", typed.trim(), escaped(&meaning))
}

/// The help, and the variable that it names.
fn without_variable(help: &str) -> (String, Option<String>) {
    match help.split_once("[env: ").and_then(|(before, rest)| Some((before, rest.split_once(']')?))) {
        Some((before, (name, after))) => (format!("{}{after}", before.trim_end()), Some(name.to_owned())),
        None => (help.to_owned(), None),
    }
}

/// Text in the cell of a table. Patterns are no emphasis, and placeholders no elements.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
        .replace('*', "\\*")
        .replace("<br>", "\u{1}")
        .replace('<', "&lt;")
        .replace('\u{1}', "<br>")
}
