//! Models on the hub of Hugging Face: what a URL of one says, which commit a revision is, and which files it has. The hub's
//! HTTP interface: <https://huggingface.co/docs/hub/api>. The cache that its Python client keeps on this machine:
//! <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.

use crate::{
    Problem, Result, StoreOptions,
    client::Client,
    location::{Kind, Location, Target, encoded_path, encoded_value},
    object::variable,
    redirect::{self, Followed},
};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use std::{
    collections::HashMap,
    fs,
    path::{Component, Path, PathBuf},
    sync::atomic::AtomicBool,
};

/// Longest description of a model.
const MAX_MODEL_BYTES: usize = 16 << 20;
/// The revision that a URL without one means.
const MAIN: &str = "main";

/// A model, or a file of it: `hf://org/model[@revision][/path]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    /// `org/model`.
    name: String,
    revision: String,
    /// The file, or the folder, which ends with `/` or is empty.
    path: String,
}

#[derive(Deserialize)]
struct Model {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Repository {
    /// Takes a URL apart.
    pub(crate) fn parse(url: &str) -> Result<Self, Problem> {
        let invalid = |what: &str| {
            let form = "write hf://org/model[@revision][/file]";
            Err(Problem::Invalid(format!("the URL {what}; {form}")))
        };
        let Some(rest) = url.strip_prefix("hf://") else { return invalid("does not begin with hf://") };
        if rest.contains(['?', '#']) {
            return invalid("has a '?' or '#'");
        }
        let (org, rest) = rest.split_once('/').unwrap_or((rest, ""));
        let (model, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (model, revision) = model.split_once('@').unwrap_or((model, MAIN));
        let Ok(revision) = percent_decode_str(revision).decode_utf8() else {
            return invalid("has a revision that is not UTF-8");
        };
        let is_name = |name: &str| {
            let is_allowed = |own: u8| own.is_ascii_alphanumeric() || b"-_.".contains(&own);
            !name.is_empty() && !name.contains("..") && name.bytes().all(is_allowed)
        };
        if matches!(org, "datasets" | "spaces") {
            return invalid("names a data set or a space, and only models can be read");
        }
        if !is_name(org) || !is_name(model) {
            return invalid("names no model");
        }
        let is_below = |text: &str| is_relative(text) || text.is_empty();
        if revision.is_empty() || !is_below(&revision) || !is_below(path.trim_end_matches('/')) {
            return invalid("has a revision or a path that leads out of the model, or is empty");
        }
        Ok(Self { name: format!("{org}/{model}"), revision: revision.into(), path: path.to_owned() })
    }

    /// Whether it is a model or a folder of it, and no file.
    pub(crate) fn is_folder(&self) -> bool {
        self.path.is_empty() || self.path.ends_with('/')
    }

    /// Its URL, as it was or with the commit that the revision was found to be.
    pub(crate) fn url(&self) -> String {
        format!("hf://{}@{}/{}", self.name, encoded_value(&self.revision), self.path)
    }

    /// The path that the hub serves the file by.
    pub(crate) fn file_path(&self) -> String {
        format!("/{}/resolve/{}/{}", self.name, encoded_value(&self.revision), encoded_path(&self.path))
    }

    fn model_path(&self) -> String {
        format!("/api/models/{}/revision/{}", self.name, encoded_value(&self.revision))
    }

    /// The commit that the revision is, which never changes.
    pub(crate) fn commit(&self) -> Option<&str> {
        is_commit(&self.revision).then_some(&*self.revision)
    }

    /// The folder of the cache that has the model.
    fn cached_model(&self, variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
        Some(cache(variable)?.join(format!("models--{}", self.name.replace('/', "--"))))
    }

    /// The files of the folder, of the names of all.
    fn files_in_folder(&self, names: impl Iterator<Item = String>) -> Vec<String> {
        let below = names.filter_map(|name| name.strip_prefix(&self.path).map(str::to_owned));
        let here = below.filter(|name| !name.contains('/') && is_relative(name));
        here.map(|name| format!("{}{name}", self.url())).collect()
    }
}

/// Returns the URLs of the files in a model or a folder of it, with its commit in place of the revision. With
/// `HF_HUB_OFFLINE`, as the cache of this machine has them.
pub(crate) fn list(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<Vec<String>, Problem> {
    let mut repository = Repository::parse(url)?;
    if is_offline(variable) {
        let snapshot = offline_snapshot(&mut repository)?;
        let entries =
            fs::read_dir(snapshot.join(&repository.path)).map_err(|error| not_cached(&repository, &error))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let names: Vec<_> = names.map(|name| format!("{}{name}", repository.path)).collect();
        return Ok(repository.files_in_folder(names.into_iter()));
    }
    let model = model(&repository, options, stop)?;
    repository.revision = model.sha;
    Ok(repository.files_in_folder(model.siblings.into_iter().map(|own| own.rfilename)))
}

/// What revisions of models on the hub are: commits, each found out once. So all files of one opening are of one commit.
#[derive(Debug, Default)]
pub struct HubCommits(HashMap<(String, String), String>);

impl HubCommits {
    /// Returns the URL of a model, a folder or a file with the commit in place of the revision. Asks the hub, unless the URL
    /// has the commit or an earlier one of the same revision was asked for. With `HF_HUB_OFFLINE`, asks the cache of this
    /// machine alone. Ends soon after `stop` is set.
    ///
    /// # Errors
    /// Those of [`HubFile::find`].
    pub fn pin(&mut self, url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<String> {
        self.pinned(url, options, stop).map_err(|problem| problem.of(&crate::shown(url), None))
    }

    fn pinned(&mut self, url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<String, Problem> {
        let mut repository = Repository::parse(url)?;
        if repository.commit().is_none() {
            let key = (repository.name.clone(), repository.revision.clone());
            if let Some(commit) = self.0.get(&key) {
                repository.revision.clone_from(commit);
            } else {
                resolve(&mut repository, options, stop)?;
                self.0.insert(key, repository.revision.clone());
            }
        }
        Ok(repository.url())
    }
}

/// Puts the commit of the revision in its place.
fn resolve(repository: &mut Repository, options: &StoreOptions, stop: &AtomicBool) -> Result<(), Problem> {
    if is_offline(variable) {
        offline_snapshot(repository)?;
    } else if repository.commit().is_none() {
        repository.revision = model(repository, options, stop)?.sha;
    }
    Ok(())
}

/// A file of a model on the hub, of a commit that does not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// Its URL, with the commit in place of the revision.
    pub url: String,
    /// Where the hub's Python client keeps it on this machine, if it does.
    pub cached: Option<PathBuf>,
}

impl HubFile {
    /// Finds out which commit a URL such as `hf://org/model@main/model.safetensors` means. Asks the hub, unless the URL has
    /// the commit. With `HF_HUB_OFFLINE`, asks the cache of this machine alone. Ends soon after `stop` is set.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if it is no URL of a file on the hub; [`Problem::NotFound`], and those of
    /// [`Object::open`](crate::Object::open).
    pub fn find(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<Self> {
        find(url, options, stop).map_err(|problem| problem.of(&crate::shown(url), None))
    }
}

/// Returns whether a URL is that of a folder: one that ends with `/`, or a model on the hub.
pub fn is_folder(url: &str) -> bool {
    url.ends_with('/') || Repository::parse(url).is_ok_and(|own| own.is_folder())
}

fn find(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<HubFile, Problem> {
    let mut repository = Repository::parse(url)?;
    if repository.is_folder() {
        return Err(Problem::Invalid("the URL names no file of the model".into()));
    }
    resolve(&mut repository, options, stop)?;
    let cached =
        repository.cached_model(variable).map(|own| own.join("snapshots").join(&repository.revision));
    let cached = cached.map(|own| own.join(&repository.path)).filter(|path| path.is_file());
    if is_offline(variable) && cached.is_none() {
        return Err(not_cached(&repository, &std::io::ErrorKind::NotFound.into()));
    }
    Ok(HubFile { url: repository.url(), cached })
}

/// The folder of the cache that has the commit of the revision, which is put in its place.
fn offline_snapshot(repository: &mut Repository) -> Result<PathBuf, Problem> {
    let none = |error: std::io::Error| not_cached(repository, &error);
    let model = repository.cached_model(variable).ok_or_else(|| none(std::io::ErrorKind::NotFound.into()))?;
    if repository.commit().is_none() {
        let commit = fs::read_to_string(model.join("refs").join(&repository.revision)).map_err(none)?;
        let commit = commit.trim();
        if !is_commit(commit) {
            return Err(none(std::io::ErrorKind::InvalidData.into()));
        }
        repository.revision = commit.to_owned();
    }
    Ok(model.join("snapshots").join(&repository.revision))
}

fn not_cached(repository: &Repository, error: &std::io::Error) -> Problem {
    let said = format!(
        "HF_HUB_OFFLINE is set, and the cache of this machine does not have {}: {}",
        repository.url(),
        error.kind()
    );
    Problem::NotFound { said }
}

/// What the hub says of the model.
fn model(repository: &Repository, options: &StoreOptions, stop: &AtomicBool) -> Result<Model, Problem> {
    let options = options.resolved(Kind::Hub, variable)?;
    let location = Location::parse(&repository.url(), &options)?;
    let client = Client::of(&location, &options);
    let base = location.target.0.strip_suffix(&repository.file_path()).unwrap_or_default();
    let target = Target(format!("{base}{}", repository.model_path()));
    let body = client.pace().persist(stop, |waiting| {
        // A model that was renamed is led on from, by the hub itself.
        let Followed { answer, place, .. } = redirect::follow(&client, &target, &[], waiting)?;
        if place.was_redirected {
            let to = place.client.origin().url();
            return Err(Problem::Redirected { said: format!("to {to}, which is another server") }.into());
        }
        client.body(answer, MAX_MODEL_BYTES, waiting)
    })?;
    let wrong = || Problem::WrongAnswer("it does not describe a model".into());
    let model: Model = serde_json::from_slice(&body).map_err(|_| wrong())?;
    match is_commit(&model.sha) {
        true => Ok(model),
        false => Err(wrong()),
    }
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|own| own.is_ascii_digit() || (b'a'..=b'f').contains(&own))
}

/// Whether a path leads below the folder that it is taken from, in a URL and on any file system.
fn is_relative(path: &str) -> bool {
    let parts_are_names = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    let is_plain =
        !path.contains(['\\', '?', '#', '%', '\0']) && !path.split('/').any(|part| matches!(part, "" | "."));
    !path.is_empty() && parts_are_names && is_plain
}

/// The folder of the hub's cache.
fn cache(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    path(&variable, "HF_HUB_CACHE")
        .or_else(|| path(&variable, "HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(home(&variable)?.join("hub")))
}

/// The folder of what the hub's tools keep.
fn home(variable: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    path(variable, "HF_HOME")
        .or_else(|| Some(path(variable, "XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(path(variable, "HOME")?.join(".cache/huggingface")))
}

/// The path that a variable has, with what Python's `expanduser` and `expandvars` put in the place of `~` and `$NAME`.
fn path(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Option<PathBuf> {
    let text = set(variable, name)?;
    let text = match text.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            format!("{}{rest}", set(variable, "HOME").unwrap_or_else(|| "~".into()))
        }
        _ => text,
    };
    let mut parts = text.split('$');
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_of_name = |own: char| own.is_ascii_alphanumeric() || own == '_';
        let (name, rest) = match part.strip_prefix('{').and_then(|own| own.split_once('}')) {
            Some(braced) => braced,
            None => part.split_at(part.find(|own| !is_of_name(own)).unwrap_or(part.len())),
        };
        match variable(name) {
            Some(value) => expanded.extend([&value, rest]),
            None => expanded.extend(["$", part]),
        }
    }
    Some(expanded.into())
}

fn set(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Option<String> {
    variable(name).filter(|text| !text.is_empty())
}

pub(crate) fn is_offline(variable: impl Fn(&str) -> Option<String>) -> bool {
    let offline = set(&variable, "HF_HUB_OFFLINE").or_else(|| set(&variable, "TRANSFORMERS_OFFLINE"));
    is_true(offline)
}

fn is_true(value: Option<String>) -> bool {
    matches!(value.unwrap_or_default().to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// The token of this machine's user, as the hub's tools find it.
pub(crate) fn token(variable: &impl Fn(&str) -> Option<String>) -> Option<String> {
    if is_true(variable("HF_HUB_DISABLE_IMPLICIT_TOKEN")) {
        return None;
    }
    // Secrets that are files often end in a line feed.
    let clean = |token: String| {
        let token = token.replace(['\r', '\n'], "").trim().to_owned();
        (!token.is_empty()).then_some(token)
    };
    let from_file = || {
        let path = path(variable, "HF_TOKEN_PATH").or_else(|| Some(home(variable)?.join("token")))?;
        clean(fs::read_to_string(path).ok()?)
    };
    let of_variable = set(variable, "HF_TOKEN").or_else(|| set(variable, "HUGGING_FACE_HUB_TOKEN"));
    of_variable.and_then(clean).or_else(from_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_model_a_revision_and_a_file() {
        for (url, expected, is_folder) in [
            ("hf://org/model", "hf://org/model@main/", true),
            ("hf://org/model/", "hf://org/model@main/", true),
            ("hf://org/model@v1.0", "hf://org/model@v1.0/", true),
            ("hf://org/model@refs%2Fpr%2F1/a", "hf://org/model@refs%2Fpr%2F1/a", false),
            ("hf://org/model/sub/a b.gguf", "hf://org/model@main/sub/a b.gguf", false),
            ("hf://org/model/sub/", "hf://org/model@main/sub/", true),
        ] {
            let found = Repository::parse(url).unwrap();
            assert_eq!((found.url().as_str(), found.is_folder()), (expected, is_folder), "{url}");
            assert_eq!(Repository::parse(&found.url()).unwrap(), found);
        }
        let file = Repository::parse("hf://org/model@refs%2Fpr%2F1/sub/a b").unwrap();
        assert_eq!(file.file_path(), "/org/model/resolve/refs%2Fpr%2F1/sub/a%20b");
        assert_eq!(file.model_path(), "/api/models/org/model/revision/refs%2Fpr%2F1");
        for url in [
            "hf://",
            "hf://model",
            "hf://datasets/org/data",
            "hf://org/model/../../other",
            "hf://org/model@..%2F..%2Fother/a",
            "hf://org/model@%2Fetc/a",
            "hf://org/model@/a",
            "hf://../model/a",
            "hf://org/model/a?download=true",
            "hf://org/model//a",
        ] {
            assert!(matches!(Repository::parse(url), Err(Problem::Invalid(_))), "{url}");
        }
    }

    #[test]
    fn names_of_files_stay_in_the_model() {
        let repository = Repository::parse("hf://org/model/sub/").unwrap();
        let names = ["a", "sub/a", "sub/../b", "sub/c/d", "sub/..", "sub/", "sub/%2e%2e"].map(str::to_owned);
        assert_eq!(repository.files_in_folder(names.into_iter()), ["hf://org/model@main/sub/a"]);
    }

    #[test]
    fn cache_and_token_are_found_where_the_hubs_tools_have_them() {
        let of = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
        };
        for (variables, expected) in [
            (of(&[("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b")]), Some("/a")),
            (of(&[("HF_HOME", "/b"), ("HOME", "/c")]), Some("/b/hub")),
            (of(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/c")]), Some("/x/huggingface/hub")),
            (of(&[("HOME", "/c")]), Some("/c/.cache/huggingface/hub")),
            (of(&[("HF_HUB_CACHE", "~/hub"), ("HOME", "/c")]), Some("/c/hub")),
            (of(&[("HF_HOME", "~"), ("HOME", "/c")]), Some("/c/hub")),
            (of(&[("HF_HOME", "~other/x"), ("HOME", "/c")]), Some("~other/x/hub")),
            (of(&[("HF_HOME", "$HOME/x"), ("HOME", "/c")]), Some("/c/x/hub")),
            (of(&[("HUGGINGFACE_HUB_CACHE", "/a/${B}_$C$D"), ("B", "b"), ("C", "c")]), Some("/a/b_c$D")),
            (of(&[("XDG_CACHE_HOME", "$HOME/x"), ("HOME", "/c")]), Some("/c/x/huggingface/hub")),
            (of(&[]), None),
        ] {
            assert_eq!(cache(variables), expected.map(PathBuf::from));
        }
        assert_eq!(token(&of(&[("HF_TOKEN", "canary")])).as_deref(), Some("canary"));
        assert_eq!(token(&of(&[("HF_HOME", "/nowhere")])), None);
        for (variables, is_offline_by_them) in [
            (of(&[("HF_HUB_OFFLINE", "true")]), true),
            (of(&[("HF_HUB_OFFLINE", "0")]), false),
            (of(&[("TRANSFORMERS_OFFLINE", "1")]), true),
            (of(&[("HF_HUB_OFFLINE", ""), ("TRANSFORMERS_OFFLINE", "1")]), true),
            (of(&[("HF_HUB_OFFLINE", "0"), ("TRANSFORMERS_OFFLINE", "1")]), false),
        ] {
            assert_eq!(is_offline(variables), is_offline_by_them);
        }
    }

    #[test]
    fn tokens_are_cleaned_and_sent_as_the_hubs_tools_do() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("token"), "of\r\na file \n").unwrap();
        let home = home.path().to_str().unwrap();
        for (variables, expected) in [
            (vec![("HF_TOKEN", "canary\n")], Some("canary")),
            (vec![("HF_TOKEN", " canary "), ("HUGGING_FACE_HUB_TOKEN", "old")], Some("canary")),
            (vec![("HF_TOKEN", ""), ("HUGGING_FACE_HUB_TOKEN", "old\r\n")], Some("old")),
            (
                vec![("HF_TOKEN", " \n"), ("HUGGING_FACE_HUB_TOKEN", "old"), ("HF_HOME", home)],
                Some("ofa file"),
            ),
            (vec![("HF_TOKEN_PATH", "~/token"), ("HOME", home)], Some("ofa file")),
            (vec![("HF_TOKEN", "canary"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")], None),
            (vec![("HF_HUB_DISABLE_IMPLICIT_TOKEN", "yes"), ("HF_HOME", home)], None),
        ] {
            let of = |name: &str| {
                variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(token(&of).as_deref(), expected, "{variables:?}");
        }
    }
}
