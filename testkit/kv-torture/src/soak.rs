//! Several processes use one store with a far tier at once: all store, load what any of them may have stored, and delete.
//! Reads and writes of both tiers fail, fall short or are changed now and then; bits of their files are flipped; processes
//! are killed, and others begin. Every byte that is delivered is compared, and the sizes of both tiers are watched.
#![allow(unsafe_code)]

use crate::{
    blocks::{Filled, Shape, mix, name},
    kill::taken,
    write::{open, options},
};
use anyhow::{Context, bail};
use hoistway_kv::{
    DropReason, Durability, Error, FarOptions, FarPolicy, Status, Store,
    fault::{Fault, FaultScript},
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{BufRead, BufReader, Write as _},
    ops::AddAssign,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of both tiers.
    root: PathBuf,
    /// How long.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// How many processes.
    #[arg(long, default_value_t = 4)]
    processes: u64,
    /// Most bytes of the near tier. The far one has twice as much.
    #[arg(long, default_value_t = 512 << 20)]
    capacity: u64,
    /// Seconds after which one of the processes is killed, again and again; 0: none is.
    #[arg(long, default_value_t = 5)]
    kill_every: u64,
    /// Milliseconds after which a bit of a file of each tier is flipped, again and again; 0: none is.
    #[arg(long, default_value_t = 500)]
    flip_every: u64,
    /// Of so many reads and writes one goes wrong; 0: none.
    #[arg(long, default_value_t = 500)]
    fault_one_in: u64,
    #[command(flatten)]
    shape: Shape,
}

#[derive(clap::Args)]
pub(crate) struct WorkerArguments {
    root: PathBuf,
    #[arg(long)]
    seconds: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    capacity: u64,
    #[arg(long)]
    fault_one_in: u64,
    #[command(flatten)]
    shape: Shape,
}

/// What a process did, or all did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Tally {
    stored: u64,
    existed: u64,
    dropped_no_room: u64,
    dropped: u64,
    delivered: u64,
    missed: u64,
    /// Found damaged, and refused.
    corrupt: u64,
    failed: u64,
    deleted: u64,
    wrong: u64,
    evicted: u64,
    /// Blocks delivered of which the far tier had bytes.
    from_far: u64,
    /// Blocks that stores ended without in the far tier.
    far_missing: u64,
    far_written: u64,
    promoted: u64,
    /// How often the far tier was given up.
    outages: u64,
    /// Blocks that were not written to the far tier when a process closed the store.
    not_written_back: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.existed += other.existed;
        self.dropped_no_room += other.dropped_no_room;
        self.dropped += other.dropped;
        self.delivered += other.delivered;
        self.missed += other.missed;
        self.corrupt += other.corrupt;
        self.failed += other.failed;
        self.deleted += other.deleted;
        self.wrong += other.wrong;
        self.evicted += other.evicted;
        self.from_far += other.from_far;
        self.far_missing += other.far_missing;
        self.far_written += other.far_written;
        self.promoted += other.promoted;
        self.outages += other.outages;
        self.not_written_back += other.not_written_back;
    }
}

/// Numbers that blocks have: so many more than there is room for that most are evicted some time.
const NUMBERS: u64 = 20_000;
/// How often a process says what it has done, for the case that it is killed.
const TALLY_EVERY: Duration = Duration::from_millis(200);
/// Longest time of an operation of the far tier.
const FAR_TIMEOUT: Duration = Duration::from_secs(1);

/// A tier.
#[derive(Clone, Copy)]
enum Tier {
    Near,
    Far,
}

impl Tier {
    const ALL: [Self; 2] = [Self::Near, Self::Far];

    fn root(self, root: &Path) -> PathBuf {
        root.join(match self {
            Self::Near => "near",
            Self::Far => "far",
        })
    }

    /// Its capacity where this is that of the near one.
    fn capacity(self, near: u64) -> u64 {
        match self {
            Self::Near => near,
            Self::Far => near * 2,
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    let whole = Duration::from_secs(arguments.seconds);
    let mut seed = arguments.processes;
    // Nothing makes the directory of a far tier: below a mount point that would be another disk.
    fs::create_dir_all(Tier::Far.root(&arguments.root))?;
    let mut workers = (0..arguments.processes)
        .map(|seed| Worker::start(arguments, seed, whole))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut all = Tally::default();
    let (mut most_bytes, mut samples, mut killed, mut flipped) = ([0; 2], 0_u64, 0_u64, 0_u64);
    while let Some(left) = whole.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) {
        for (most, tier) in most_bytes.iter_mut().zip(Tier::ALL) {
            *most = taken(&tier.root(&arguments.root))?.1.max(*most);
        }
        samples += 1;
        let elapsed = started.elapsed();
        let is_due = |every: Duration, done: u64| {
            elapsed.as_millis().checked_div(every.as_millis()).is_some_and(|due| due > u128::from(done))
        };
        if is_due(Duration::from_secs(arguments.kill_every), killed) && left > Duration::from_secs(2) {
            killed += 1;
            let fated = (mix(killed) % arguments.processes) as usize;
            let worker = std::mem::replace(&mut workers[fated], Worker::start(arguments, seed, left)?);
            seed += 1;
            all += worker.kill()?;
        }
        if is_due(Duration::from_millis(arguments.flip_every), flipped) {
            flipped += 1;
            Tier::ALL.iter().try_for_each(|tier| flip_a_bit(&tier.root(&arguments.root), flipped))?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for worker in workers {
        all += worker.end()?;
    }
    println!(
        "{}",
        serde_json::json!({
            "seconds": started.elapsed().as_secs(), "processes": arguments.processes, "killed": killed,
            "flipped": flipped, "fault_one_in": arguments.fault_one_in, "capacity": arguments.capacity,
            "most_bytes": most_bytes[0], "most_far_bytes": most_bytes[1], "samples": samples, "all": all,
        })
    );
    let is_too_much = |(most, tier): (u64, Tier)| most > tier.capacity(arguments.capacity);
    if all.wrong > 0 || most_bytes.into_iter().zip(Tier::ALL).any(is_too_much) {
        bail!("{} blocks were wrong; {most_bytes:?} bytes were taken", all.wrong);
    }
    Ok(())
}

/// A process that uses the store.
struct Worker {
    child: Child,
    tally: Option<JoinHandle<anyhow::Result<Tally>>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It has ended by now, unless the trial was given up.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    fn start(arguments: &Arguments, seed: u64, life: Duration) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("soak-worker")
            .arg(&arguments.root)
            .args(["--seconds", &life.as_secs().to_string(), "--seed", &seed.to_string()])
            .args(["--capacity", &arguments.capacity.to_string()])
            .args(["--fault-one-in", &arguments.fault_one_in.to_string()])
            .args(["--block-bytes", &arguments.shape.block_bytes.to_string()])
            .args(["--shards", &arguments.shape.shards.to_string()])
            .stdout(Stdio::piped())
            .spawn()?;
        let out = BufReader::new(child.stdout.take().context("a process has no output")?);
        let tally = std::thread::spawn(move || {
            let mut last = Tally::default();
            for line in out.lines() {
                // The last one may have been cut short.
                last = serde_json::from_str(&line?).unwrap_or(last);
            }
            Ok(last)
        });
        Ok(Self { child, tally: Some(tally) })
    }

    fn kill(mut self) -> anyhow::Result<Tally> {
        self.child.kill()?;
        self.child.wait()?;
        self.tally()
    }

    fn end(mut self) -> anyhow::Result<Tally> {
        let status = self.child.wait()?;
        if !status.success() {
            bail!("a process ended with {status}");
        }
        self.tally()
    }

    fn tally(mut self) -> anyhow::Result<Tally> {
        let tally = self.tally.take().context("it has been asked before")?;
        tally.join().map_err(|_| anyhow::anyhow!("reading what a process said failed"))?
    }
}

/// Flips a bit of one of the files of a tier, in a page that was written.
fn flip_a_bit(root: &Path, number: u64) -> anyhow::Result<()> {
    let mut files = Vec::new();
    // The near one may not have been made yet.
    for folder in fs::read_dir(root).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        files.extend(fs::read_dir(folder.path()).into_iter().flatten().flatten().map(|entry| entry.path()));
    }
    files.sort_unstable();
    let Some(path) = files.get((mix(number) % files.len().max(1) as u64) as usize) else { return Ok(()) };
    // It may be gone by now.
    let Ok(file) = fs::File::options().read(true).write(true).open(path) else { return Ok(()) };
    let len = file.metadata()?.len();
    let (at, mut byte) = (mix(number ^ 1) % len.max(1), [0]);
    // Nor is it as long as it was.
    if file.read_exact_at(&mut byte, at).is_ok() {
        byte[0] ^= 1 << (number % 8);
        file.write_all_at(&byte, at)?;
    }
    Ok(())
}

/// What goes wrong with reads and writes of one process.
fn faults(root: &Path, seed: u64, one_in: u64) -> FaultScript {
    let root = Tier::Far.root(root);
    FaultScript::new(move |operation| {
        let chance = mix(seed << 32 ^ operation.number);
        if one_in == 0 || !chance.is_multiple_of(one_in) {
            return None;
        }
        let within = mix(chance) % operation.len.max(1);
        Some(match mix(chance ^ 2) % 6 {
            0 if operation.is_write => Fault::Errno(Errno::NOSPC.raw_os_error()),
            0 | 1 => Fault::Errno(Errno::IO.raw_os_error()),
            2 => Fault::Short(within),
            3 if operation.path.starts_with(&root) && within.is_multiple_of(8) => {
                Fault::Delay(FAR_TIMEOUT * 2)
            }
            3 => Fault::Delay(Duration::from_millis(within % 50)),
            4 => Fault::Flip(within),
            _ if operation.is_write => Fault::Lost,
            _ => Fault::Errno(Errno::AGAIN.raw_os_error()),
        })
    })
}

pub(crate) fn work(arguments: &WorkerArguments) -> anyhow::Result<()> {
    let (root, seed) = (&arguments.root, arguments.seed);
    let policy = if seed.is_multiple_of(2) { FarPolicy::WriteThrough } else { FarPolicy::WriteBack };
    let far = FarOptions::new(Tier::Far.root(root))
        .capacity_bytes(Tier::Far.capacity(arguments.capacity))
        .min_free_bytes(0)
        .timeout(FAR_TIMEOUT)
        .policy(policy)
        .faults(faults(root, seed ^ 1 << 16, arguments.fault_one_in));
    let options = options(&Tier::Near.root(root), arguments.capacity, Durability::Batched)
        .faults(faults(root, seed, arguments.fault_one_in))
        .far(far);
    let (store, namespace) = open(options)?;
    let until = Instant::now() + Duration::from_secs(arguments.seconds);
    let (mut tally, mut state, mut said) = (Tally::default(), arguments.seed, Instant::now());
    while Instant::now() < until {
        state = mix(state);
        // Some numbers are much more popular than others.
        let number = match state % 3 {
            0 => mix(state ^ 1) % NUMBERS,
            1 => mix(state ^ 1) % (NUMBERS / 10),
            _ => mix(state ^ 1) % (NUMBERS / 100),
        };
        match mix(state ^ 2) % 100 {
            0 => tally.deleted += namespace.delete(&[name(number)]).unwrap_or(0) as u64,
            1..50 => {
                let (request, _) = arguments.shape.request(number, Filled::WithContents)?;
                // SAFETY: the request keeps its memory, which nothing writes to.
                let completion = unsafe { namespace.store(request)? }.wait(None)?;
                tally.far_missing += completion.far_missing;
                for status in completion.items {
                    match status {
                        Status::Ok => tally.stored += 1,
                        Status::Exists => tally.existed += 1,
                        Status::Dropped(DropReason::NoRoom) => tally.dropped_no_room += 1,
                        Status::Dropped(_) => tally.dropped += 1,
                        _ => tally.failed += 1,
                    }
                }
            }
            _ => {
                let (request, memory) = arguments.shape.request(number, Filled::WithZeros)?;
                // SAFETY: the request keeps its memory, which is read only after the ticket has ended.
                let completion = unsafe { namespace.load(request)? }.wait(None)?;
                if completion.items.iter().all(|status| *status == Status::Ok) {
                    tally.delivered += 1;
                    tally.from_far += u64::from(completion.far_bytes > 0);
                    tally.wrong += u64::from(!arguments.shape.matches(number, &memory));
                } else if completion.items.contains(&Status::Corrupt) {
                    tally.corrupt += 1;
                } else if completion.items.contains(&Status::Miss) {
                    tally.missed += 1;
                } else {
                    tally.failed += 1;
                }
            }
        }
        if said.elapsed() > TALLY_EVERY {
            said = Instant::now();
            count(&store, &mut tally)?;
            say(&tally)?;
        }
    }
    count(&store, &mut tally)?;
    match store.close(Some(Duration::from_secs(60))) {
        // It was given up, or has no room.
        Err(Error::NotWrittenBack { blocks, .. }) => tally.not_written_back = blocks,
        closed => closed?,
    }
    say(&tally)
}

/// Counts what the store did so far.
fn count(store: &Store, tally: &mut Tally) -> anyhow::Result<()> {
    let stats = store.stats()?;
    tally.evicted = stats.evicted_blocks;
    if let Some(far) = stats.far {
        tally.far_written = far.written_blocks;
        tally.promoted = far.promoted_blocks;
        tally.outages = far.outages;
    }
    Ok(())
}

/// Prints what was done so far.
fn say(tally: &Tally) -> anyhow::Result<()> {
    let line = serde_json::to_string(tally)?;
    // In one write.
    std::io::stdout().write_all(format!("{line}\n").as_bytes())?;
    Ok(())
}
