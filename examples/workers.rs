//! Worker processes that fill pinned buffers of their trainer: no byte is copied between processes.
//!
//! `cargo run --example workers -- [WORKERS] [BATCHES]`. One worker aborts while it fills a buffer, which then becomes free.

#![allow(clippy::print_stdout)] // The example prints its result.
#![allow(unsafe_code)] // Passes the descriptor of the shared memory to workers.

use std::error::Error;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use pinpool::Pool;
use pinpool_shared_buffers::{SharedPool, SharedWorker, Ticket};
use pinpool_testing::{SinkMemory, SinkStream};

const BYTES: usize = 4 << 20;
const LONG: Duration = Duration::from_secs(30);

/// The worker process. Its arguments are the process ID and the descriptor of the trainer, and its standard input is a socket on which
/// it receives batch numbers and sends tickets.
fn work(trainer: &str, descriptor: &str, dies: bool) -> Result<(), Box<dyn Error>> {
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    // SAFETY: the trainer and its workers change the memory only through pinpool.
    let worker = unsafe { SharedWorker::attach_to_process(trainer.parse()?, descriptor.parse()?) }?;
    let mut number = [0; 8];
    while socket.read_exact(&mut number).is_ok() {
        let batch = u64::from_le_bytes(number);
        let mut buf = worker.get(BYTES, LONG)?;
        buf.as_mut_slice().fill(number[0]); // decode into it
        if batch == 7 && dies {
            std::process::abort();
        }
        socket.write_all(&buf.send(batch)?.to_bytes())?;
    }
    Ok(())
}

struct Worker {
    socket: UnixStream,
    process: Child,
}

fn start(shared: &SharedPool, dies: bool) -> Result<Worker, Box<dyn Error>> {
    let (socket, theirs) = UnixStream::pair()?;
    let mut command = Command::new(std::env::current_exe()?);
    // SAFETY: only its number is passed, to a worker that changes the memory only through pinpool.
    let descriptor = unsafe { shared.descriptor() }.as_raw_fd();
    command
        .args(["--worker", &std::process::id().to_string(), &descriptor.to_string()])
        .args(dies.then_some("dies"))
        .stdin(OwnedFd::from(theirs));
    Ok(Worker { socket, process: command.spawn()? })
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [first, trainer, descriptor, dies @ ..] = &args[..]
        && first == "--worker"
    {
        return work(trainer, descriptor, !dies.is_empty());
    }
    let count = args.first().map_or(Ok(4), |count| count.parse::<usize>())?.max(1);
    let batches: u64 = args.get(1).map_or(Ok(40), |count| count.parse())?;
    let pool = Pool::builder().build()?;
    let shared = SharedPool::new(&pool, BYTES, 2 * count)?;
    let (stream, mut replaced) = (SinkStream::new()?, 0);
    let mut workers = (0..count).map(|at| start(&shared, at == 7 % count)).collect::<Result<Vec<_>, _>>()?;
    for batch in 0..batches {
        let at = usize::try_from(batch)? % workers.len();
        let mut bytes = [0; Ticket::BYTES];
        loop {
            let Worker { socket, process } = &mut workers[at];
            let requested = socket.write_all(&batch.to_le_bytes());
            if requested.and_then(|()| socket.read_exact(&mut bytes)).is_ok() {
                break;
            }
            // A closed socket means that the worker has died; a new worker fills the batch.
            process.wait()?;
            replaced += 1;
            workers[at] = start(&shared, false)?;
        }
        let buf = shared.receive(&Ticket::from_bytes(&bytes)?)?;
        let mut device = SinkMemory::new(buf.len());
        buf.copy_to(&stream, &mut device)?; // the buffer is free again when the copy has completed
        stream.synchronize()?;
        assert!(device.read().iter().all(|&byte| byte == batch.to_le_bytes()[0]), "batch {batch}");
    }
    for Worker { socket, mut process } in workers {
        drop(socket);
        process.wait()?;
    }
    shared.recover()?;
    shared.pool().maintain();
    println!("{batches} batches by {count} workers, {replaced} replaced; {:?}", shared.counts());
    Ok(())
}
