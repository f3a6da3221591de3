//! What tests of credentials share: services that stand in, and files.

use super::Identity;
use crate::{
    Problem, StoreOptions,
    http::{Origin, TICK},
    location::Kind,
    services::{Files, Services},
};
use bytes::Bytes;
use http::{Request, Response, header::AUTHORIZATION, request::Parts};
use reqsign_core::{Context, HttpSend, StaticEnv, time::Timestamp};
use std::{
    collections::HashMap,
    io::{Read, Write},
    net::TcpListener,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// A service that gives the same answer to each request, and counts them.
#[derive(Clone, Debug, Default)]
pub(super) struct Service(pub(super) Arc<AtomicUsize>, pub(super) u16, pub(super) &'static str);

impl HttpSend for Service {
    async fn http_send(&self, _: Request<Bytes>) -> reqsign_core::Result<Response<Bytes>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let answer = Response::builder().status(self.1).body(Bytes::from_static(self.2.as_bytes()));
        answer.map_err(|error| reqsign_core::Error::unexpected(error.to_string()))
    }
}

/// What comes of signing five requests, the last one's headers, and how often the service was asked.
pub(super) fn signed(
    kind: Kind,
    options: &StoreOptions,
    envs: &[(&str, &str)],
    service: (u16, &'static str),
) -> (Result<Parts, Problem>, usize) {
    let service = Service(Arc::default(), service.0, service.1);
    let envs: HashMap<String, String> =
        envs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let context = Context::new()
        .with_env(StaticEnv { home_dir: None, envs })
        .with_file_read(Files)
        .with_http_send(service.clone());
    let identity = Identity::within(context, Services::default(), kind, &local(), options).unwrap().unwrap();
    let sign = || {
        let request = Request::get("http://127.0.0.1/bucket/key").body(()).unwrap();
        let mut parts = request.into_parts().0;
        identity.sign(&mut parts, &AtomicBool::new(false)).map(|()| parts)
    };
    let mut last = sign();
    (1..5).for_each(|_| last = sign());
    (last, service.0.load(Ordering::Relaxed))
}

pub(super) fn elsewhere(change: impl FnOnce(&mut StoreOptions)) -> StoreOptions {
    let mut options = StoreOptions { endpoint: Some("http://127.0.0.1".into()), ..StoreOptions::default() };
    change(&mut options);
    options
}

pub(super) fn local() -> Origin {
    Origin { is_tls: false, host: "127.0.0.1".into(), port: 80 }
}

pub(super) fn authorization(parts: &Parts) -> &str {
    parts.headers[AUTHORIZATION].to_str().unwrap()
}

pub(super) const ROLE: &[(&str, &str)] = &[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1/role")];

/// A service of a role that gives these answers in turn, and the last for ever: status and how long its keys are valid.
pub(super) fn role_service(answers: &'static [(u16, i64)]) -> (Identity, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let role = format!("http://{}/role", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let Ok(mut socket) = socket else { return };
            let number = count.fetch_add(1, Ordering::Relaxed);
            let (status, seconds) = answers[number.min(answers.len() - 1)];
            let _ = socket.read(&mut [0; 4096]);
            let until = Timestamp::now() + Duration::from_secs(seconds.unsigned_abs());
            let body = format!(
                "{{\"AccessKeyId\":\"key-{number}\",\"SecretAccessKey\":\"canary\",\"Token\":\"canary\",\
                 \"Expiration\":\"{}\"}}",
                until.format_rfc3339_zulu()
            );
            let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
            let _ = socket.write_all((head + &body).as_bytes());
        }
    });
    let envs = [("AWS_CONTAINER_CREDENTIALS_FULL_URI".to_owned(), role)].into();
    let services = Services::default();
    let context = Context::new()
        .with_env(StaticEnv { home_dir: None, envs })
        .with_file_read(Files)
        .with_http_send(services.clone());
    let identity =
        Identity::within(context, services, Kind::S3, &local(), &elsewhere(|_| ())).unwrap().unwrap();
    (identity, asked)
}

pub(super) fn sign_once(identity: &Identity) -> Result<String, Problem> {
    let mut parts = Request::get("http://127.0.0.1/a").body(()).unwrap().into_parts().0;
    identity.sign(&mut parts, &AtomicBool::new(false)).map(|()| authorization(&parts).to_owned())
}

/// The shared files of AWS's tools, and the variables that name them.
pub(super) fn aws_files(directory: &Path, config: &str, credentials: &str) -> [(&'static str, String); 2] {
    let write = |name: &str, text: &str| {
        let path = directory.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    [
        ("AWS_CONFIG_FILE", write("config", config)),
        ("AWS_SHARED_CREDENTIALS_FILE", write("credentials", credentials)),
    ]
}

pub(super) fn with_role<'a>(files: &'a [(&'static str, String); 2]) -> Vec<(&'static str, &'a str)> {
    files.iter().map(|(name, path)| (*name, path.as_str())).chain(ROLE.iter().copied()).collect()
}

/// A profile whose keys a program prints; the program notes in a file that it ran.
#[cfg(unix)]
pub(super) fn program(directory: &Path, prints: &str) -> [(&'static str, String); 2] {
    use std::os::unix::fs::PermissionsExt;
    let folder = directory.join("my tools");
    std::fs::create_dir_all(&folder).unwrap();
    let (path, ran) = (folder.join("keys"), directory.join("ran"));
    let number = directory.join("process");
    let notes = format!("echo $$ > '{}'; echo $1 >> '{}'", number.display(), ran.display());
    std::fs::write(&path, format!("#!/bin/sh\n{notes}\n{prints}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let process = format!("credential_process = \"{}\" --once\n", path.display());
    aws_files(directory, &format!("[default]\n{process}[profile mine]\n{process}"), "")
}

/// Waits until the program that ran last is gone.
#[cfg(unix)]
pub(super) fn wait_for_its_end(directory: &Path) {
    #[cfg(target_os = "linux")]
    {
        let number = std::fs::read_to_string(directory.join("process")).unwrap();
        while crate::services::tests::runs(number.trim()) {
            thread::sleep(TICK);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = directory;
}

pub(super) const ASSUMED: &str = "<AssumeRoleResponse><AssumeRoleResult><Credentials>\
    <AccessKeyId>ASIAASSUMEDROLE00000</AccessKeyId><SecretAccessKey>s</SecretAccessKey>\
    <SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>\
    </Credentials></AssumeRoleResult></AssumeRoleResponse>";
