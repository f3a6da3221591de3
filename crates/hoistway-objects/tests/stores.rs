//! Google, Azure and the hub of Hugging Face: the right bytes of one version, or an error that says why.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use hoistway_objects::{Error, HEAD_BYTES, HubCommits, HubFile, Object, Problem, StoreOptions, Unsaid, list};
use objectd::{Dialect, Fault, Faults, Server};
use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    process::Command,
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

const LEN: usize = HEAD_BYTES + 700_001;
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
const CANARY: &str = "canary";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OTHER_COMMIT: &str = "76543210fedcba9876543210fedcba9876543210";

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 % 251) as u8).collect()
}

fn options(pairs: &[(&str, &str)]) -> StoreOptions {
    let mut options = StoreOptions::default();
    pairs.iter().for_each(|(name, value)| options.set(name, value).unwrap());
    options
}

fn listed(url: &str, options: &StoreOptions) -> Result<Vec<String>, Error> {
    list(url, options, &AtomicBool::new(false))
}

fn read(object: &Object, offset: usize, len: usize) -> Result<Vec<u8>, Error> {
    let mut target = vec![0xA5; len];
    object.read(offset as u64, &mut target, &AtomicBool::new(false))?;
    Ok(target)
}

/// A server that answered late is waited for longer: on a busy machine, no request is repeated as too slow.
fn slow() -> Faults {
    Faults { latency: Duration::from_millis(700), ..Faults::default() }
}

/// Reads all of an object, by more than one request.
fn read_all(url: &str, options: &StoreOptions) -> Vec<u8> {
    let (object, mut found) = Object::open_with_head(url, options, &AtomicBool::new(false)).unwrap();
    assert!(object.is_pinned());
    let rest = object.len() as usize - found.len();
    found.extend(read(&object, found.len(), rest).unwrap());
    found
}

#[test]
fn objects_of_google_are_pinned_by_their_generation() {
    let server = Server::start().unwrap();
    server.speak(Dialect::Google);
    let bytes = bytes(LEN);
    server.put("models/llama/a b.gguf", &bytes);
    let options = options(&[("endpoint", &server.url()), ("anonymous", "true")]);
    let url = "gs://models/llama/a b.gguf";
    assert_eq!(listed("gs://models/llama/", &options).unwrap(), [url]);
    // The generation tells the version where there is no ETag, too.
    for fault in [None, Some(Fault::NoETag), Some(Fault::WeakETag)] {
        server.fail(Faults { fault, every: 1, ..Faults::default() });
        server.take_requests();
        assert!(read_all(url, &options) == bytes);
        let requests = server.take_requests();
        assert!(requests[0].if_generation_match.is_none() && requests[0].authorization.is_none());
        // The first may be repeated, on a busy machine.
        let is_pinned = |own: &objectd::Request| own.if_generation_match.is_some();
        let is_first = |own: &objectd::Request| own.range == requests[0].range;
        assert!(requests.iter().all(|own| is_pinned(own) != is_first(own)), "{requests:?}");
        for ignores_preconditions in [false, true] {
            let object = Object::open(url, &options).unwrap();
            server.put("models/llama/a b.gguf", &bytes);
            server.fail(Faults { fault, every: 1, ignores_preconditions, ..Faults::default() });
            let error = read(&object, 50, 1000).unwrap_err();
            assert!(matches!(error.problem, Problem::Changed(_)), "{fault:?}: {error:?}");
        }
    }
}

#[test]
fn blobs_of_azure_are_read_by_key_by_signature_and_without() {
    let server = Server::start().unwrap();
    server.speak(Dialect::Azure);
    let bytes = bytes(LEN);
    for name in ["a b.gguf", "b.gguf", "c & d.gguf", "deeper/e.gguf"] {
        server.put(&format!("account/models/llama/{name}"), &bytes);
    }
    let endpoint = format!("{}/account", server.url());
    let key = [("account", "account"), ("account_key", "Y2FuYXJ5")];
    let signature = [("sas_token", "?sv=2021-08-06&sig=canary")];
    for (pairs, how) in [(&key[..], "SharedKey"), (&signature[..], "sig"), (&[("anonymous", "true")], "")] {
        let options = options(&[&[("endpoint", &*endpoint)], pairs].concat());
        let names = ["a b.gguf", "b.gguf", "c & d.gguf"].map(|name| format!("az://models/llama/{name}"));
        assert_eq!(listed("az://models/llama/", &options).unwrap(), names);
        server.take_requests();
        assert!(read_all("az://models/llama/a b.gguf", &options) == bytes);
        for request in server.take_requests() {
            let authorization = request.authorization.as_deref().unwrap_or_default();
            assert_eq!(authorization.starts_with("SharedKey account:"), how == "SharedKey", "{request:?}");
            assert_eq!(request.target.ends_with("?sv=2021-08-06&sig=canary"), how == "sig", "{request:?}");
        }
        let object = Object::open("az://models/llama/a b.gguf", &options).unwrap();
        server.fail(Faults::every(1, Fault::Swap));
        let changed = read(&object, 50, 1000).unwrap_err();
        assert!(matches!(changed.problem, Problem::Changed(_)), "{changed:?}");
        server.fail(Faults::always(Fault::Status(403)));
        let denied = Object::open("az://models/llama/a b.gguf", &options).unwrap_err();
        for error in [changed, denied] {
            assert!(!format!("{error} {error:?} {object:?}").contains(CANARY), "{error:?}");
        }
        server.fail(Faults::default());
        server.put("account/models/llama/a b.gguf", &bytes);
    }
}

#[test]
fn a_range_of_azure_with_a_flipped_bit_is_asked_for_again() {
    let server = Server::start().unwrap();
    server.speak(Dialect::Azure);
    let bytes = bytes(LEN);
    server.put("account/models/a.gguf", &bytes);
    let endpoint = format!("{}/account", server.url());
    let with = |checksums| {
        let pairs = [("endpoint", &*endpoint), ("anonymous", "true"), ("checksums", checksums)];
        options(&pairs)
    };
    server.fail(slow());
    let object = Object::open("az://models/a.gguf", &with("auto")).unwrap();
    assert_eq!(object.known_digest().unwrap().name(), "MD5");
    server.fail(Faults { fault: Some(Fault::Flip), only: Some(1), ..Faults::default() });
    server.take_requests();
    assert!(read(&object, 50, 70_000).unwrap() == bytes[50..70_050]);
    assert_eq!(server.take_requests().len(), 2);
    server.fail(Faults::always(Fault::Flip));
    let error = read(&object, 50, 70_000).unwrap_err();
    assert!(error.to_string().contains("another CRC-64/NVME"), "{error}");
    // So does the first request for an object.
    server.fail(Faults { fault: Some(Fault::Flip), only: Some(1), ..Faults::default() });
    assert!(read_all("az://models/a.gguf", &with("auto")) == bytes);
    // Where checksums are off, or the server knows none, the bytes are those that came.
    server.fail(Faults::default());
    server.take_requests();
    assert!(read_all("az://models/a.gguf", &with("off")) == bytes);
    assert!(server.take_requests().iter().all(|own| !own.wants_range_crc));
    server.say_checksums(objectd::Checksums::None);
    assert!(read_all("az://models/a.gguf", &with("auto")) == bytes);
    assert_eq!(server.take_requests().iter().filter(|own| own.wants_range_crc).count(), 1);
}

#[test]
fn a_store_that_refuses_the_checksums_of_ranges_is_read_without_and_one_refusal_of_a_proxy_changes_nothing() {
    let server = Server::start().unwrap();
    server.speak(Dialect::Azure);
    let bytes = bytes(LEN);
    server.put("account/models/a.gguf", &bytes);
    let endpoint = format!("{}/account", server.url());
    let options = options(&[("endpoint", &*endpoint), ("anonymous", "true")]);
    let asked = || server.take_requests().iter().filter(|own| own.wants_range_crc).count();
    server.fail(slow());
    let object = Object::open("az://models/a.gguf", &options).unwrap();
    asked();
    server.fail(Faults { fault: Some(Fault::Status(501)), only: Some(1), ..Faults::default() });
    for requests in [1, 1] {
        assert!(read(&object, 50, 70_000).unwrap() == bytes[50..70_050]);
        assert_eq!(asked(), requests);
    }
    for status in [400, 501] {
        // Another address is another server to the client.
        let other = Server::start().unwrap();
        other.speak(Dialect::Azure);
        other.put("account/models/a.gguf", &bytes);
        other.fail(Faults { range_crc_status: Some(status), ..slow() });
        let endpoint = format!("{}/account", other.url());
        let options = self::options(&[("endpoint", &*endpoint), ("anonymous", "true")]);
        assert!(read_all("az://models/a.gguf", &options) == bytes, "{status}");
        assert_eq!(other.take_requests().iter().filter(|own| own.wants_range_crc).count(), 1, "{status}");
    }
}

#[test]
fn an_answer_of_a_web_server_with_a_digest_and_a_flipped_bit_is_asked_for_again() {
    let (server, bytes) = (Server::start().unwrap(), bytes(LEN));
    server.put("a.gguf", &bytes);
    server.put("short.gguf", &bytes[..1000]);
    server.say_checksums(objectd::Checksums::Digests);
    let url = format!("{}/a.gguf", server.url());
    let object = Object::open(&url, &StoreOptions::default()).unwrap();
    assert_eq!(object.known_digest().unwrap().name(), "SHA-256");
    server.fail(Faults { fault: Some(Fault::Flip), only: Some(1), ..Faults::default() });
    assert!(read(&object, 50, 70_000).unwrap() == bytes[50..70_050]);
    for name in ["a.gguf", "short.gguf"] {
        server.fail(Faults { fault: Some(Fault::Flip), only: Some(1), ..Faults::default() });
        let found = read_all(&format!("{}/{name}", server.url()), &StoreOptions::default());
        assert!(found == bytes[..found.len()], "{name}");
    }
    server.fail(Faults::always(Fault::Flip));
    let error = read(&object, 50, 70_000).unwrap_err();
    assert!(error.to_string().contains("another SHA-256"), "{error}");
}

/// A hub with a model, the server that has its large files, and options for it.
fn hub() -> (Server, Server, StoreOptions, Vec<u8>) {
    let (hub, elsewhere, bytes) = (Server::start().unwrap(), Server::start().unwrap(), bytes(LEN));
    hub.lead_to(&elsewhere);
    hub.put_model("org/model", COMMIT);
    hub.put_file("org/model", "config.json", b"{}", false);
    hub.put_file("org/model", "model.safetensors", &bytes, true);
    hub.put_file("org/model", "sub/b.safetensors", &bytes, true);
    hub.require_token(CANARY);
    let options = options(&[("endpoint", &hub.url()), ("token", CANARY)]);
    (hub, elsewhere, options, bytes)
}

#[test]
fn a_model_is_listed_by_its_commit_and_read_where_the_hub_leads() {
    let (hub, elsewhere, options, bytes) = hub();
    let names = ["config.json", "model.safetensors"].map(|name| format!("hf://org/model@{COMMIT}/{name}"));
    for url in
        ["hf://org/model", "hf://org/model/", "hf://org/model@main", &format!("hf://org/model@{COMMIT}")]
    {
        assert_eq!(listed(url, &options).unwrap(), names, "{url}");
    }
    let below = listed("hf://org/model/sub/", &options).unwrap();
    assert_eq!(below, [format!("hf://org/model@{COMMIT}/sub/b.safetensors")]);
    let file = HubFile::find("hf://org/model/model.safetensors", &options, &AtomicBool::new(false)).unwrap();
    assert_eq!(file.url, names[1]);
    assert!(read_all(&file.url, &options) == bytes);
    assert_eq!(read_all(&names[0], &options), b"{}");
    // The token stays with the hub.
    let requests = elsewhere.take_requests();
    assert!(!requests.is_empty() && requests.iter().all(|own| own.authorization.is_none()), "{requests:?}");
    assert!(hub.take_requests().iter().all(|own| own.authorization.is_some()));
    // What was asked for once is asked of the hub no more.
    let object = Object::open(&file.url, &options).unwrap();
    hub.take_requests();
    assert!(read(&object, 50, 1000).unwrap() == bytes[50..1050]);
    assert!(hub.take_requests().is_empty());
}

#[test]
fn a_url_that_expires_is_renewed_for_the_same_file() {
    let (hub, elsewhere, options, bytes) = hub();
    let url = format!("hf://org/model@{COMMIT}/model.safetensors");
    let object = Object::open(&url, &options).unwrap();
    for expired_status in [None, Some(400)] {
        elsewhere.fail(Faults { expired_status, ..Faults::default() });
        elsewhere.expire();
        assert!(read(&object, 50, 1000).unwrap() == bytes[50..1050]);
        assert!(read(&object, 0, LEN).unwrap() == bytes);
    }
    // Another file by the same name, or another length than the hub said.
    elsewhere.expire();
    let other: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    hub.put_file("org/model", "model.safetensors", &other, true);
    let changed = read(&object, 50, 1000).unwrap_err();
    assert!(matches!(changed.problem, Problem::Changed(_)), "{changed:?}");
    hub.fail(Faults { wrong_linked_size: true, ..Faults::default() });
    let wrong = Object::open(&url, &options).unwrap_err();
    assert!(
        matches!(&wrong.problem, Problem::WrongAnswer(text) if text.contains("leads to one of")),
        "{wrong:?}"
    );
    hub.fail(Faults::default());
    elsewhere.fail(Faults::always(Fault::Status(403)));
    let denied = Object::open(&url, &options).unwrap_err();
    assert!(matches!(denied.problem, Problem::Denied { .. }), "{denied:?}");
    for error in [changed, wrong, denied] {
        assert!(!format!("{error} {error:?} {object:?}").contains(CANARY), "{error:?}");
    }
}

#[test]
fn an_answer_of_another_commit_is_an_error() {
    let (hub, _elsewhere, options, _) = hub();
    hub.fail(Faults { wrong_commit: true, ..Faults::default() });
    for name in ["model.safetensors", "config.json"] {
        let error = Object::open(&format!("hf://org/model@{COMMIT}/{name}"), &options).unwrap_err();
        assert!(
            matches!(&error.problem, Problem::WrongAnswer(text) if text.contains(COMMIT)),
            "{name}: {error:?}"
        );
    }
}

#[test]
fn short_files_that_the_hub_sends_whole_are_read_at_any_place() {
    let (hub, _elsewhere, options, _) = hub();
    let bytes = bytes(5000);
    hub.put_file("org/model", "short.json", &bytes, false);
    hub.fail(Faults::always(Fault::Whole));
    let url = format!("hf://org/model@{COMMIT}/short.json");
    let (object, head) = Object::open_with_head(&url, &options, &AtomicBool::new(false)).unwrap();
    assert_eq!(head, bytes);
    for (offset, len) in [(0, 5000), (7, 100), (4999, 1)] {
        assert_eq!(read(&object, offset, len).unwrap(), bytes[offset..][..len], "{len} bytes from {offset}");
    }
    hub.put_file("org/model", "short.json", &bytes[1..], false);
    let changed = read(&object, 7, 100).unwrap_err();
    assert!(matches!(changed.problem, Problem::Changed(_)), "{changed:?}");
}

#[test]
fn a_model_that_was_renamed_is_found_by_its_former_name() {
    let (hub, _elsewhere, options, bytes) = hub();
    hub.rename_model("org/model", "new/name");
    let names = listed("hf://org/model", &options).unwrap();
    assert!(names.iter().all(|name| name.contains(COMMIT)), "{names:?}");
    let file = names.iter().find(|name| name.ends_with("model.safetensors")).unwrap();
    assert!(read_all(file, &options) == bytes);
}

/// Set for the process that asks.
const KEYS: &str = "HOISTWAY_TEST_KEYS";

#[test]
fn keys_of_the_shared_files_are_read_again_once_the_files_were_written() {
    let name = "keys_of_the_shared_files_are_read_again_once_the_files_were_written";
    let Some(keys) = std::env::var_os(KEYS) else {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name]).env(KEYS, path("credentials"));
        child.env("AWS_CONTAINER_CREDENTIALS_FULL_URI", role_of_a_container());
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"] {
            child.env_remove(name);
        }
        child.env("AWS_SHARED_CREDENTIALS_FILE", path("credentials"));
        let output = child.env("AWS_CONFIG_FILE", path("config")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    };
    let server = Server::start().unwrap();
    server.put("models/a", b"bytes");
    let options = options(&[("endpoint", &server.url())]);
    let write = |key: &str| {
        let text = format!("[default]\naws_access_key_id = {key}\naws_secret_access_key = {CANARY}\n");
        std::fs::write(&keys, text).unwrap();
    };
    let assert_signed_by = |key: &str| {
        let signed = server.take_requests();
        let is_by_key = |own: &objectd::Request| {
            own.authorization.as_ref().is_some_and(|own| own.contains(&format!("Credential={key}/")))
        };
        assert!(!signed.is_empty() && signed.iter().all(is_by_key), "{key}: {signed:?}");
    };
    for key in ["FIRST", "SECOND-KEY"] {
        write(key);
        server.take_requests();
        Object::open("s3://models/a", &options).unwrap();
        assert_signed_by(key);
    }
    // Also for an object that is open, once its key is refused.
    let long = bytes(3 << 20);
    server.put("models/long", &long);
    let object = Object::open("s3://models/long", &options).unwrap();
    server.refuse_key("SECOND-KEY");
    assert!(matches!(read(&object, 2 << 20, 9).unwrap_err().problem, Problem::Denied { .. }));
    write("THIRD");
    assert_eq!(read(&object, 2 << 20, 9).unwrap(), long[2 << 20..][..9]);
    // The refusal of a question for a checksum has no code, and holds for the keys of then.
    let never = AtomicBool::new(false);
    let (asking, _) = Object::open_asking("s3://models/long", &options, &never).unwrap();
    asking.wait_for_checksum(Instant::now() + LONG, &never);
    let ask = || asking.ask_again(Instant::now() + LONG, &never).unwrap().0;
    server.refuse_key("THIRD");
    assert!(matches!(ask(), Err(Unsaid::Never(_))));
    write("FOR-A-READ");
    assert_eq!(read(&asking, 2 << 20, 9).unwrap(), long[2 << 20..][..9]);
    ask().unwrap();
    server.refuse_key("FOR-A-READ");
    write("FOR-A-HEAD");
    ask().unwrap();
    let object = asking;
    // Files that are about to be written make it no other caller, and do it no harm for longer than that.
    server.refuse_key("FOR-A-HEAD");
    let config = std::env::var_os("AWS_CONFIG_FILE").unwrap();
    for (keys_text, config_text) in [("", ""), ("", "[default]\ncredential_process = \"/opt/rot")] {
        std::fs::write(&keys, keys_text).unwrap();
        std::fs::write(&config, config_text).unwrap();
        server.take_requests();
        let problem = read(&object, 2 << 20, 9).unwrap_err().problem;
        assert!(matches!(problem, Problem::Denied { .. }), "{problem:?}");
        assert_signed_by("FOR-A-HEAD");
        if config_text.is_empty() {
            Object::open("s3://models/a", &options).unwrap();
            assert_signed_by("POD");
        }
    }
    std::fs::write(&config, "[default]\n").unwrap();
    write("FOURTH-KEY");
    server.take_requests();
    assert_eq!(read(&object, 2 << 20, 9).unwrap(), long[2 << 20..][..9]);
    let by_new_key = |own: &objectd::Request| {
        own.authorization.as_ref().is_some_and(|own| own.contains("Credential=FOURTH-KEY/"))
    };
    assert!(server.take_requests().last().is_some_and(by_new_key));
}

/// Serves credentials as a container has them, for as long as this process runs, and returns their URL.
fn role_of_a_container() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/role", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut socket in listener.incoming().map_while(Result::ok) {
            // What was not read would reset the connection.
            let mut lines = BufReader::new(&socket).lines().map_while(Result::ok);
            let _ = lines.find(String::is_empty);
            let body = format!(
                r#"{{"AccessKeyId":"POD","SecretAccessKey":"{CANARY}","Token":"t","Expiration":"2999-01-01T00:00:00Z"}}"#
            );
            let _ = write!(
                socket,
                "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
        }
    });
    url
}

#[test]
fn files_of_one_opening_are_of_one_commit() {
    let (hub, _elsewhere, options, _) = hub();
    let (stop, mut commits) = (AtomicBool::new(false), HubCommits::default());
    let first = commits.pin("hf://org/model/config.json", &options, &stop).unwrap();
    // What `main` is changes in the middle of the opening.
    hub.put_model("org/model", OTHER_COMMIT);
    let second = commits.pin("hf://org/model@main/model.safetensors", &options, &stop).unwrap();
    assert_eq!(
        [first, second],
        ["config.json", "model.safetensors"].map(|name| format!("hf://org/model@{COMMIT}/{name}"))
    );
    let later = HubCommits::default().pin("hf://org/model", &options, &stop).unwrap();
    assert_eq!(later, format!("hf://org/model@{OTHER_COMMIT}/"));
}

#[test]
fn what_the_hub_does_not_have_is_told_in_its_words() {
    let (hub, _elsewhere, options, _) = hub();
    for (url, code) in [("hf://org/none", "RepoNotFound"), ("hf://org/model@none", "RevisionNotFound")] {
        let error = listed(url, &options).unwrap_err();
        assert!(matches!(&error.problem, Problem::NotFound { said } if said.contains(code)), "{error:?}");
    }
    let missing = Object::open(&format!("hf://org/model@{COMMIT}/none"), &options).unwrap_err();
    assert!(
        matches!(&missing.problem, Problem::NotFound { said } if said.contains("EntryNotFound")),
        "{missing:?}"
    );
    let anonymous = self::options(&[("endpoint", &hub.url()), ("anonymous", "true")]);
    let denied = listed("hf://org/model", &anonymous).unwrap_err();
    assert!(
        matches!(&denied.problem, Problem::Denied { said } if said.contains("RepoNotFound")),
        "{denied:?}"
    );
    // A commit replaces another: what was listed is gone, and not mixed.
    let names = listed("hf://org/model", &options).unwrap();
    hub.put_model("org/model", OTHER_COMMIT);
    hub.put_file("org/model", "model.safetensors", b"other", false);
    let gone = Object::open(&names[1], &options).unwrap_err();
    assert!(matches!(gone.problem, Problem::NotFound { .. }), "{gone:?}");
}
