//! A small store as a customer: writes with sync groups, gathered pieces with checksums on the way, device events, the
//! caller's memory with leases, unaligned remote ranges, deadlines.

use crate::kit::{PATIENCE, eventually, lock};
use hoistway_io::{
    executor::{
        Bound, Carried, Charge, Customer, Executor, Flight, Gate, GroupId, Handler, InFlightLimit, Limits,
        Next, Operation, Patience, Priority, QueueId, QueueOptions, Reason, Scheduler, Service, Submission,
        Whose,
    },
    lane::{Done, Lane},
};
use std::{
    collections::{HashMap, HashSet},
    io,
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

/// A local disk, a remote server, and a device's memory.
const DISK: QueueId = QueueId(0);
const REMOTE: QueueId = QueueId(1);
/// Bytes that one attempt moves at most: every operation takes several.
const ATTEMPT: usize = 7;

/// Memory of the caller's, and how many operations use it.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    fn of(bytes: &[u8]) -> Self {
        Self(Arc::new(Mutex::new(bytes.to_vec())))
    }

    /// A lease on bytes of it.
    fn piece(&self, start: usize, len: usize) -> Piece {
        Piece { memory: self.clone(), start, len }
    }

    fn leases(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

struct Piece {
    memory: Memory,
    start: usize,
    len: usize,
}

enum Work {
    /// Moves pieces to or from neighbouring bytes of the disk, as one.
    Write(usize, Vec<Piece>),
    Read(usize, Vec<Piece>),
    /// Writes the checksums of the group's pieces, which earlier stages have computed.
    Header(usize),
    Sync,
}

struct Job {
    work: Work,
    done: usize,
    bytes: Vec<u8>,
    sums: Arc<Mutex<Vec<u32>>>,
}

impl Job {
    fn len(&self) -> usize {
        match &self.work {
            Work::Write(_, pieces) | Work::Read(_, pieces) => pieces.iter().map(|piece| piece.len).sum(),
            Work::Header(_) => self.bytes.len(),
            Work::Sync => 1,
        }
    }

    fn offset(&self) -> usize {
        match self.work {
            Work::Write(offset, _) | Work::Read(offset, _) | Work::Header(offset) => offset,
            Work::Sync => 0,
        }
    }
}

/// What a disk has, and what would be left of it without power.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    syncs: usize,
}

/// How a group has ended, and what of the disk was durable then.
type End = (Result<(), Reason>, Vec<u8>);

#[derive(Default)]
struct Store {
    disk: Arc<Mutex<Disk>>,
    reached: Mutex<HashSet<&'static str>>,
    ends: Mutex<HashMap<&'static str, End>>,
}

impl Customer for Store {
    type Operation = Job;
    type Group = (&'static str, mpsc::Sender<&'static str>);
    type Event = &'static str;
    type Error = Reason;

    fn ended(&self, (name, ended): Self::Group, result: Result<(), Reason>) {
        let durable = lock(&self.disk).durable.clone();
        lock(&self.ends).insert(name, (result, durable));
        // The test may wait for others only.
        let _ = ended.send(name);
    }

    fn is_reached(&self, event: &&'static str) -> Result<bool, Reason> {
        Ok(lock(&self.reached).contains(event))
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

struct Mover;

impl Handler<Store> for Mover {
    fn begin(&mut self, mut flight: Flight<Store>) -> Next<Store> {
        let job = &mut flight.content;
        match &job.work {
            Work::Write(_, pieces) => {
                for piece in pieces {
                    let memory = lock(&piece.memory.0);
                    let bytes = &memory[piece.start..piece.start + piece.len];
                    lock(&job.sums).push(checksum(bytes));
                    job.bytes.extend_from_slice(bytes);
                }
            }
            Work::Read(..) => job.bytes = vec![0; job.len()],
            Work::Header(_) => job.bytes = lock(&job.sums).iter().flat_map(|sum| sum.to_le_bytes()).collect(),
            Work::Sync => {}
        }
        Next::Carry(flight)
    }

    fn settle(&mut self, mut flight: Flight<Store>, result: io::Result<usize>) -> Next<Store> {
        let job = &mut flight.content;
        match result {
            Ok(count) => job.done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => {
                flight.end(Err(Reason::Unserved));
                return Next::Ended;
            }
        }
        if job.done < job.len() {
            return Next::Carry(flight);
        }
        if let Work::Read(_, pieces) = &job.work {
            let mut rest = &job.bytes[..];
            for piece in pieces {
                let (bytes, others) = rest.split_at(piece.len);
                lock(&job.sums).push(checksum(bytes));
                lock(&piece.memory.0)[piece.start..piece.start + piece.len].copy_from_slice(bytes);
                rest = others;
            }
        }
        flight.end(Ok(()));
        Next::Ended
    }
}

/// Moves a few bytes at a time, from or to anywhere; every third attempt is interrupted.
struct DiskLane(Arc<Mutex<Disk>>, Option<Carried<Job>>, usize);

impl Lane<Carried<Job>> for DiskLane {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        self.1.iter().len()
    }

    fn push(&mut self, op: Carried<Job>) {
        self.1 = Some(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<Carried<Job>>>) -> io::Result<()> {
        let Some(mut op) = self.1.take() else { return Ok(()) };
        self.2 += 1;
        if self.2.is_multiple_of(3) {
            done.push(Done { op, result: Err(io::ErrorKind::Interrupted.into()) });
            return Ok(());
        }
        let mut disk = lock(&self.0);
        let job = &mut op.content;
        let (start, count) = (job.offset() + job.done, ATTEMPT.min(job.len() - job.done));
        let span = job.done..job.done + count;
        let result = match job.work {
            Work::Sync => {
                disk.syncs += 1;
                disk.durable = disk.bytes.clone();
                Ok(1)
            }
            Work::Read(..) if start >= disk.bytes.len() => Err(io::ErrorKind::UnexpectedEof.into()),
            Work::Read(..) => {
                job.bytes[span].copy_from_slice(&disk.bytes[start..start + count]);
                Ok(count)
            }
            Work::Write(..) | Work::Header(_) => {
                let len = disk.bytes.len().max(start + count);
                disk.bytes.resize(len, 0);
                disk.bytes[start..start + count].copy_from_slice(&job.bytes[span]);
                Ok(count)
            }
        };
        drop(disk);
        done.push(Done { op, result });
        Ok(())
    }
}

struct Stand {
    executor: Executor<Store>,
    ended: (mpsc::Sender<&'static str>, mpsc::Receiver<&'static str>),
    sums: Arc<Mutex<Vec<u32>>>,
}

impl Stand {
    fn new(disk: &[u8], threads: usize) -> Self {
        let limits = Limits { accepted: Bound::new(1 << 20, 100), in_flight: Bound::new(1 << 16, 8) };
        let store = Store::default();
        lock(&store.disk).bytes = disk.to_vec();
        let queues = [QueueOptions::default(), QueueOptions::default()];
        let executor = Executor::new(Scheduler::new(store, limits, &queues));
        executor.spawn_watcher("watch").unwrap();
        for queues in [&[DISK], &[REMOTE]].into_iter().cycle().take(2 * threads) {
            executor
                .spawn("store", move |scheduler| {
                    let lane = DiskLane(scheduler.customer().disk.clone(), None, 0);
                    let service =
                        Service { queues, limit: InFlightLimit::fixed(1), patience: Patience::UntilOver };
                    scheduler.serve(lane, &mut Mover, service);
                })
                .unwrap();
        }
        Self { executor, ended: mpsc::channel(), sums: Arc::default() }
    }

    fn store(&self) -> &Store {
        self.executor.scheduler().customer()
    }

    /// A group of works, each with its stage.
    fn group(&self, name: &'static str, queue: QueueId, works: Vec<(u64, Work)>) -> Submission<Store> {
        let operations = works.into_iter().map(|(order, work)| {
            let content = Job { work, done: 0, bytes: Vec::new(), sums: self.sums.clone() };
            Operation { queue, charge: Charge::of_bytes(content.len() as u64), order, content }
        });
        Submission::new((name, self.ended.0.clone()), operations.collect())
    }

    fn submit(&self, submission: Submission<Store>) -> GroupId {
        self.executor.scheduler().submit(submission).unwrap()
    }

    /// How a group has ended, which must be the next to end.
    fn end(&self, name: &'static str) -> End {
        assert_eq!(self.ended.1.recv_timeout(PATIENCE), Ok(name));
        lock(&self.store().ends).remove(name).unwrap()
    }
}

#[test]
fn a_block_is_durable_with_its_header_when_its_group_ends() {
    let stand = Stand::new(&[], 3);
    let memory = Memory::of(b"a block of which the parts are written at once");
    let works = vec![
        (0, Work::Write(64, vec![memory.piece(0, 20)])),
        (0, Work::Write(84, vec![memory.piece(20, 26)])),
        // The header says that the data is there: it must not be on the disk before.
        (1, Work::Sync),
        (2, Work::Header(0)),
        (3, Work::Sync),
    ];
    let mut block = stand.group("block", DISK, works);
    (block.gate, block.priority) = (Gate::Stages, Priority::Background);
    stand.submit(block);
    let (result, durable) = stand.end("block");
    assert_eq!(result, Ok(()));
    let bytes = lock(&memory.0).clone();
    assert_eq!(durable[64..64 + 46], bytes);
    let mut sums: Vec<_> = lock(&stand.sums).iter().map(|sum| sum.to_le_bytes()).collect();
    assert_eq!(durable[..8], sums.concat());
    let mut expected = [&bytes[..20], &bytes[20..]].map(|part| checksum(part).to_le_bytes()).to_vec();
    sums.sort_unstable();
    expected.sort_unstable();
    assert_eq!(sums, expected);
    assert_eq!(lock(&stand.store().disk).syncs, 2);
}

#[test]
fn one_sync_serves_all_writes_of_a_group_and_none_follows_a_failure() {
    let stand = Stand::new(&[], 2);
    let memory = Memory::of(&[1; 64]);
    let mut works: Vec<_> =
        (0..8).map(|part| (0, Work::Write(part * 8, vec![memory.piece(part * 8, 8)]))).collect();
    works.push((1, Work::Sync));
    let mut file = stand.group("file", DISK, works);
    file.gate = Gate::Stages;
    stand.submit(file);
    assert_eq!(stand.end("file"), (Ok(()), vec![1; 64]));
    assert_eq!(lock(&stand.store().disk).syncs, 1);
    let mut broken =
        stand.group("broken", DISK, vec![(0, Work::Read(1000, vec![memory.piece(0, 8)])), (1, Work::Sync)]);
    broken.gate = Gate::Stages;
    stand.submit(broken);
    assert_eq!(stand.end("broken").0, Err(Reason::Unserved));
    assert_eq!(lock(&stand.store().disk).syncs, 1);
}

#[test]
fn gathered_pieces_are_one_read_of_any_bytes() {
    let disk: Vec<u8> = (0..=255).collect();
    let stand = Stand::new(&disk, 1);
    let (left, right) = (Memory::of(&[0; 40]), Memory::of(&[0; 40]));
    // Neither its ends nor its pieces lie on blocks.
    let pieces = vec![left.piece(3, 11), right.piece(0, 1), left.piece(20, 17)];
    stand.submit(stand.group("read", REMOTE, vec![(0, Work::Read(33, pieces))]));
    assert_eq!(stand.end("read").0, Ok(()));
    assert_eq!(lock(&left.0)[3..14], disk[33..44]);
    assert_eq!(lock(&right.0)[0], disk[44]);
    assert_eq!(lock(&left.0)[20..37], disk[45..62]);
    let sums: Vec<_> = [33..44, 44..45, 45..62].map(|range| checksum(&disk[range])).into();
    assert_eq!(*lock(&stand.sums), sums);
}

#[test]
fn what_waits_for_a_device_holds_no_thread() {
    let stand = Stand::new(&[0; 16], 1);
    let memory = Memory::of(&[7; 16]);
    let mut after =
        stand.group("after the kernel", DISK, vec![(0, Work::Write(0, vec![memory.piece(0, 16)]))]);
    after.event = Some("kernel");
    stand.submit(after);
    let target = Memory::of(&[1; 16]);
    // The only thread of the queue is free for others.
    stand.submit(stand.group("meanwhile", DISK, vec![(0, Work::Read(0, vec![target.piece(0, 16)]))]));
    assert_eq!(stand.end("meanwhile").0, Ok(()));
    assert_eq!(*lock(&target.0), [0; 16], "written before the device was done");
    assert_eq!(memory.leases(), 1);
    lock(&stand.store().reached).insert("kernel");
    assert_eq!(stand.end("after the kernel").0, Ok(()));
    assert_eq!(lock(&stand.store().disk).bytes, [7; 16]);
}

#[test]
fn the_callers_memory_is_its_own_again_when_a_group_ends() {
    let stand = Stand::new(&[5; 64], 2);
    let memory = Memory::of(&[0; 64]);
    for (name, deadline, is_cancelled) in
        [("read", None, false), ("late", Some(Instant::now()), false), ("cancelled", None, true)]
    {
        let works = (0..4).map(|part| (0, Work::Read(part * 16, vec![memory.piece(part * 16, 16)])));
        let mut group = stand.group(name, DISK, works.collect());
        group.deadline = deadline;
        group.event = is_cancelled.then_some("never");
        let id = stand.submit(group);
        if is_cancelled {
            assert_eq!(memory.leases(), 4);
            stand.executor.scheduler().cancel(Whose::Group(id));
        }
        let end = stand.end(name).0;
        // Another operation of the group may still be in flight only if the end has not been told.
        assert_eq!(memory.leases(), 0, "{name}");
        match name {
            "late" => assert!(matches!(end, Ok(()) | Err(Reason::TimedOut))),
            "cancelled" => assert_eq!(end, Err(Reason::Cancelled)),
            _ => assert_eq!(end, Ok(())),
        }
    }
}

#[test]
fn a_deadline_ends_what_waits_for_an_event_that_never_comes() {
    let stand = Stand::new(&[0; 16], 1);
    let memory = Memory::of(&[7; 16]);
    let mut late = stand.group("late", DISK, vec![(0, Work::Write(0, vec![memory.piece(0, 16)]))]);
    late.event = Some("never");
    late.deadline = Some(Instant::now() + Duration::from_millis(10));
    stand.submit(late);
    assert_eq!(stand.end("late").0, Err(Reason::TimedOut));
    assert_eq!(memory.leases(), 0);
    lock(&stand.store().reached).insert("never");
    eventually("it waits for an event that never comes", || stand.executor.scheduler().figures().groups == 0);
    assert_eq!(lock(&stand.store().disk).bytes, [0; 16]);
}
