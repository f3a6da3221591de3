//! Models as the hub of Hugging Face has them: a commit, its files, and another server that has the large ones.

use super::{Object, Request, Server, State, checksums::Digests, lock, refuse, stream::Stream};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    io::{self, Write},
    sync::{Arc, atomic::Ordering},
};

/// What a hub answers with that says the wrong commit.
pub(crate) const OTHER_COMMIT: &str = "76543210fedcba9876543210fedcba9876543210";

/// A model.
#[derive(Debug, Default)]
pub(crate) struct Model {
    commit: String,
    /// Files by name, and whether another server has them.
    files: BTreeMap<String, (Arc<Object>, bool)>,
}

impl Server {
    /// Puts a commit of a model such as `org/model`, in place of what `main` was. It is a hub from then on.
    pub fn put_model(&self, name: &str, commit: &str) {
        let model = Model { commit: commit.to_owned(), ..Model::default() };
        lock(&self.state.models).insert(name.to_owned(), model);
    }

    /// Renames a model, and leads on from its former name.
    pub fn rename_model(&self, name: &str, new: &str) {
        let mut models = lock(&self.state.models);
        if let Some(model) = models.remove(name) {
            models.insert(new.to_owned(), model);
        }
        lock(&self.state.renamed).insert(name.to_owned(), new.to_owned());
    }

    /// Puts a file of a model. One that is `linked` lies on the server that [`Server::lead_to`] names.
    pub fn put_file(&self, model: &str, file: &str, bytes: &[u8], linked: bool) {
        let sum: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let etag = format!("\"{sum}\"");
        let mut models = lock(&self.state.models);
        let Some(found) = models.get_mut(model) else { return };
        if let (true, Some((_, elsewhere))) = (linked, &*lock(&self.state.leads_to)) {
            elsewhere.put(
                &format!("blobs/{}/{file}", found.commit),
                bytes.to_vec(),
                "\"of-the-other-server\"".into(),
            );
        }
        let commit = Some(found.commit.clone());
        let (bytes, digests) = (bytes.to_vec(), Digests::default());
        let object = Object { bytes, etag, generation: 0, commit, is_of_blocks: false, digests };
        found.files.insert(file.to_owned(), (Arc::new(object), linked));
    }

    /// Has the hub lead to this server for files that are linked.
    pub fn lead_to(&self, elsewhere: &Server) {
        *lock(&self.state.leads_to) = Some((elsewhere.url(), elsewhere.state.clone()));
    }

    /// Has the URLs expire by which a hub has led here so far.
    pub fn expire(&self) {
        self.state.expired.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the hub answer those alone who have a token.
    pub fn require_token(&self, token: &str) {
        *lock(&self.state.token) = Some(token.to_owned());
    }
}

impl State {
    pub(crate) fn is_hub(&self) -> bool {
        !lock(&self.models).is_empty()
    }

    /// Whether a request has no signature of a hub's, or one that is still valid.
    pub(crate) fn accepts(&self, query: &str) -> bool {
        let number = query.split('&').find_map(|pair| pair.strip_prefix("number="));
        number.is_none_or(|given| given == self.expired.load(Ordering::Relaxed).to_string())
    }

    pub(crate) fn answer_as_hub(&self, socket: &mut Stream, request: &Request, path: &str) -> io::Result<()> {
        if lock(&self.token)
            .as_ref()
            .is_some_and(|token| request.authorization != Some(format!("Bearer {token}")))
        {
            return refuse(socket, "401 Unauthorized", "", "X-Error-Code: RepoNotFound\r\n");
        }
        let missing = |socket: &mut Stream, code: &str| {
            refuse(socket, "404 Not Found", "", &format!("X-Error-Code: {code}\r\n"))
        };
        let models = lock(&self.models);
        let parts: Vec<&str> = path.trim_start_matches("api/models/").splitn(5, '/').collect();
        let [org, model, verb, revision, ref file @ ..] = parts[..] else {
            return missing(socket, "RepoNotFound");
        };
        if let Some(new) = lock(&self.renamed).get(&format!("{org}/{model}")) {
            let to = path.replacen(&format!("{org}/{model}"), new, 1);
            return refuse(socket, "307 Temporary Redirect", "", &format!("Location: /{to}\r\n"));
        }
        let Some(found) = models.get(&format!("{org}/{model}")) else {
            return missing(socket, "RepoNotFound");
        };
        if revision != "main" && revision != found.commit {
            return missing(socket, "RevisionNotFound");
        }
        if verb == "revision" {
            let names: Vec<_> =
                found.files.keys().map(|name| format!("{{\"rfilename\":\"{name}\"}}")).collect();
            let text = format!("{{\"sha\":\"{}\",\"siblings\":[{}]}}", found.commit, names.join(","));
            return write!(socket, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        }
        let name = file.first().copied().unwrap_or_default();
        let Some((object, linked)) = found.files.get(name) else { return missing(socket, "EntryNotFound") };
        let commit = found.commit.clone();
        let (object, linked) = (object.clone(), *linked);
        drop(models);
        let elsewhere = lock(&self.leads_to).clone().filter(|_| linked);
        let Some((url, state)) = elsewhere else {
            let (faults, _) = *lock(&self.faults);
            let fault = faults.next(request.range, &mut lock(&self.faults).1);
            return self.send(socket, request, &object, fault);
        };
        let (faults, _) = *lock(&self.faults);
        let wrong = usize::from(faults.wrong_linked_size);
        let shown = if faults.wrong_commit { OTHER_COMMIT } else { &*commit };
        let head = format!(
            "X-Repo-Commit: {shown}\r\nX-Linked-ETag: {}\r\nX-Linked-Size: {}\r\nLocation: \
             {url}/blobs/{commit}/{name}?sig=canary&number={}\r\n",
            object.etag,
            object.bytes.len() + wrong,
            state.expired.load(Ordering::Relaxed),
        );
        refuse(socket, "302 Found", "", &head)
    }
}
