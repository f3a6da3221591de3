//! The engine on a stand-in of 3FS: route `usrbio`, whole loads, both clients, host memory and a stand-in of a device.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

#[path = "../../../../crates/hoistway/tests/common/mod.rs"]
mod common;
mod delivering;
mod failing;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../mounted/fixture.rs"]
mod fixture;
mod reading;
mod refusing;
mod to_device;

use fixture::{Fixture, library_path};
use hoistway::{DeviceId, LoadOptions, Loaded, Route, UsrbioClient};
use std::{
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};
use usrbiod::Options;

/// Footprints and the stand-in of a device are the process's: tests that load take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mounted daemon with a model of every type, to oneself.
struct Model {
    fixture: Fixture,
    /// On the mount.
    path: PathBuf,
    file: Vec<u8>,
    _turn: MutexGuard<'static, ()>,
}

impl Model {
    /// `None`, and a line that says why, where FUSE cannot be used.
    #[track_caller]
    fn start() -> Option<Self> {
        Self::start_with(&Options::default())
    }

    #[track_caller]
    fn start_with(options: &Options) -> Option<Self> {
        let turn = turn();
        start_what_stays();
        let fixture = Fixture::start_with(options)?;
        let (_, file) = common::mixed_model(&fixture.behind(""));
        Some(Self { path: fixture.path("mixed.safetensors"), fixture, file, _turn: turn })
    }

    fn load(&self, options: &LoadOptions) -> hoistway::Result<Loaded> {
        hoistway::load(&[&self.path], options)
    }
}

/// cuFile's threads and files, which stay once it was used: before a test counts them.
fn start_what_stays() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        let [_, device] = common::devices();
        let disk = common::on_device::disk();
        let (path, _) = common::mixed_model(disk.path());
        let options = LoadOptions::default().route(Route::GdsCompat).device(device);
        // Where the file system has no direct reads, there is no cuFile either.
        let _ = hoistway::load(&[&path], &options);
    });
}

fn by(route: Route, client: UsrbioClient, device: DeviceId) -> LoadOptions {
    let directory = library_path().parent().unwrap().to_owned();
    // A directory, so that the native client is chosen only where it is named.
    LoadOptions::default().route(route).usrbio(client).device(device).usrbio_directories(vec![directory])
}

/// Every way through USRBIO: both clients, to host memory and to a device.
fn ways() -> Vec<LoadOptions> {
    let clients = [UsrbioClient::Native, UsrbioClient::Vendor];
    let named = |device| clients.map(|client| by(Route::Usrbio, client, device));
    let [host, device] = common::devices();
    let mut ways: Vec<LoadOptions> = [host, device].into_iter().flat_map(named).collect();
    ways.push(by(Route::Auto, UsrbioClient::Native, host));
    ways.push(by(Route::Auto, UsrbioClient::Native, device));
    ways.push(by(Route::Staged, UsrbioClient::Native, device));
    ways
}
