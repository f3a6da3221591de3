//! temporary
use super::*;
use std::time::Instant;
#[test]
#[ignore]
fn speed() {
    let root = std::path::PathBuf::from(std::env::var("SPEED_ROOT").unwrap());
    for (block, count) in [(1usize << 20, 1024u64), (64 << 10, 8192)] {
        for route in ROUTES {
            for skew in [0usize, 64] {
                let engine = start(options(&root, route)).unwrap();
                let name = format!("speed-{route}-{block}-{skew}");
                let _ = std::fs::remove_file(root.join(&name));
                let file = new_file(&root, &name);
                let stride = block as u64 + 4096;
                rustix::fs::fallocate(file.buffered(), rustix::fs::FallocateFlags::empty(), 0, stride * count).unwrap();
                let mut memory: Vec<Memory> = (0..64).map(|n| Memory::of(&pattern(block, n), skew)).collect();
                let pieces: Vec<Piece> = memory.iter_mut().map(|m| m.piece()).collect();
                for direction in [Direction::Write, Direction::Read, Direction::Read] {
                    let begun = Instant::now();
                    let (sender, receiver) = mpsc::channel();
                    let mut pending = 0;
                    for n in 0..count {
                        if pending >= 64 { receiver.recv().unwrap(); pending -= 1; }
                        let sender = sender.clone();
                        let done: Done = Box::new(move |o: Outcome| { o.result.as_ref().unwrap(); assert!(o.checksums[0].is_some()); sender.send(()).unwrap() });
                        let header = match direction { Direction::Write => Header::Write { offset: n * stride, make: Box::new(|_| vec![1; 4096]) }, _ => Header::Read { offset: n * stride } };
                        let parts = vec![Part { offset: n * stride + 4096, len: block as u64, pieces: vec![pieces[n as usize % 64]] }];
                        engine.submit(vec![Job { header, ..job(direction, &file, parts, done) }]);
                        pending += 1;
                    }
                    for _ in 0..pending { receiver.recv().unwrap(); }
                    let s = begun.elapsed().as_secs_f64();
                    println!("{block:>8} {route:>9} skew {skew:>2} {direction:?}: {:.2} GB/s", (block as u64 * count) as f64 / s / 1e9);
                }
                std::fs::remove_file(root.join(&name)).unwrap();
            }
        }
    }
}
