//! The invariants after each step and at the end.

use pinpool::Stats;
use pinpool::unstable::fast_path;

use crate::device::other_stamp;
use crate::world::{Handle, World};

type Check = Result<(), String>;

fn equal(what: &str, left: u64, right: u64) -> Check {
    if left == right { Ok(()) } else { Err(format!("{what}: {left} against {right}")) }
}

/// Checks the world between two steps, while no pool call is running.
pub(crate) fn after_step(world: &World) -> Check {
    world.site.take_report().map_or(Ok(()), Err)?;
    contents(world)?;
    let pools = world.pools.borrow();
    for (index, pool) in pools.iter().enumerate() {
        let Some(pool) = pool else { continue };
        let stats = pool.stats();
        note(world, &stats);
        if index > 0 {
            partition(world, index, &stats).map_err(|what| format!("partition {index}: {what}; {stats:?}"))?;
            continue;
        }
        counts(world, &stats).map_err(|what| format!("{what}; {stats:?}"))?;
        if world.setup.tensorflow == 0
            && matches!(pool, Handle::Pool(pool) if fast_path::is_open(pool) != (stats.requests.waiting == 0))
        {
            return Err(format!("{} requests wait, but the fast path is open", stats.requests.waiting));
        }
        if stats.copies.in_flight == 0 {
            world.site.record_swept();
        }
        ledger(world, &stats).map_err(|what| format!("{what}; {stats:?}"))?;
    }
    Ok(())
}

/// Checks a partition's requests, and that its bytes in use never exceed its limit.
fn partition(world: &World, index: usize, stats: &Stats) -> Check {
    let tally = world.tallies.borrow()[index];
    equal("gets", stats.requests.served, tally.gets)?;
    equal("failed gets", stats.requests.failed, tally.failed)?;
    if stats.memory.in_use_bytes > stats.limits.max_bytes.unwrap_or(u64::MAX) {
        return Err("over its limit".to_owned());
    }
    let held = world.held.borrow();
    let bytes: u64 = held.iter().filter(|held| held.pool == index).map(|held| held.len() as u64).sum();
    if stats.memory.in_use_bytes < bytes {
        return Err(format!("{} B are claimed, and users hold {bytes} B", stats.memory.in_use_bytes));
    }
    let is_unused = stats.requests.waiting == 0 && !world.waiting.borrow().iter().any(|waiting| waiting.pool == index);
    let is_out = bytes > 0 || world.pending.borrow().iter().any(|pending| pending.pool == index);
    let in_flight = world.pools.borrow()[0].as_ref().is_none_or(|pool| {
        let stats = pool.stats();
        stats.copies.in_flight > 0 || stats.memory.quarantined > 0
    });
    if is_unused && !is_out && !in_flight && stats.memory.in_use_bytes > 0 {
        return Err(format!("{} B are claimed for nothing", stats.memory.in_use_bytes));
    }
    Ok(())
}

/// Checks that the bytes in users' buffers are unchanged.
fn contents(world: &World) -> Check {
    for held in world.held.borrow().iter() {
        if let Some(found) = other_stamp(held.start, held.len(), held.value) {
            return Err(format!("a buffer of {} B holds {found:#x} instead of {:#x}", held.len(), held.value));
        }
    }
    Ok(())
}

fn counts(world: &World, stats: &Stats) -> Check {
    stats.unstable_validate().map_err(|error| error.to_string())?;
    // Partitions are included.
    equal("gets", stats.requests.served, world.tallies.borrow().iter().map(|tally| tally.gets).sum())?;
    equal("failed gets", stats.requests.failed, world.tallies.borrow().iter().map(|tally| tally.failed).sum())?;
    let held = world.held.borrow();
    let mine = held.iter();
    let pending = world.pending.borrow().len();
    // A waiting request may have been handed a buffer, which is in use although its task does not know this yet.
    let waiting = world.waiting.borrow().len() as u64;
    let known = (mine.clone().count() + pending) as u64;
    if !(known..=known + waiting).contains(&stats.memory.in_use) {
        return Err(format!("buffers in use: {} against {known}, and {waiting} wait: {stats:?}", stats.memory.in_use));
    }
    let bytes: u64 = mine.filter(|held| held.is_pinned()).map(|held| held.capacity() as u64).sum();
    if stats.memory.in_use_bytes < bytes {
        return Err(format!("{} B are in use, and users hold {bytes} B", stats.memory.in_use_bytes));
    }
    let is_faulty = world.device_failed.get() || world.site.memory().is_faulty();
    if !is_faulty && (stats.memory.quarantined > 0 || stats.memory.quarantined_bytes > 0) {
        return Err(format!(
            "{} buffers and {} B are lost without a fault",
            stats.memory.quarantined, stats.memory.quarantined_bytes
        ));
    }
    Ok(())
}

/// Checks that the source holds the bytes that the pool reports.
fn ledger(world: &World, stats: &Stats) -> Check {
    let memory = world.site.memory();
    equal("bytes held by the source and by the pool", memory.held_bytes, stats.memory.held_bytes)?;
    if stats.memory.peak_held_bytes < memory.peak_bytes {
        return Err(format!("the peak is {} B, and {} B were held", stats.memory.peak_held_bytes, memory.peak_bytes));
    }
    equal("bytes in transit at rest", stats.memory.transit_bytes, 0)?;
    if stats.backend != "simulated" || stats.pinned_by.is_none() {
        return Err("another backend".to_owned());
    }
    if world.setup.tensorflow == 0 && world.setup.extra_page == 0 {
        let net_bytes = stats.memory.pin.bytes - stats.memory.unpin.bytes;
        equal("bytes acquired and not released", net_bytes, stats.memory.held_bytes)?;
    }
    Ok(())
}

/// Adds statistics to the trace that do not depend on time, and that reflect all other statistics.
fn note(world: &World, stats: &Stats) {
    let figures = [
        stats.requests.hits,
        stats.requests.failed + stats.requests.pageable,
        stats.memory.evictions.total(),
        stats.memory.idle_bytes,
        stats.memory.in_use_bytes,
        stats.memory.free_bytes,
        stats.memory.quarantined_bytes,
        stats.copies.in_flight_bytes,
        stats.memory.overhead_bytes,
    ];
    figures.into_iter().for_each(|figure| world.note(figure));
    let (calls, queries) = (world.site.memory().calls, world.site.device().queries);
    calls.into_iter().chain([queries]).for_each(|count| world.note(count));
}

/// Checks, once everything is dropped, that memory still held has a reason and that memory a device may use is untouched.
pub(crate) fn after_end(world: &World) -> Check {
    world.site.take_report().map_or(Ok(()), Err)?;
    let memory = world.site.memory();
    world.note(memory.held_bytes);
    let in_use = world.site.in_use().into_iter().filter(|bytes| memory.owns(bytes.start));
    for bytes in in_use {
        if !memory.is_committed(&bytes) {
            return Err(format!("{} B that a device may use are released", bytes.len()));
        }
    }
    // A release that waits for the device would wait for a copy that never ends.
    if world.setup.blocks_on_release == 1 && world.site.any_stuck() {
        return Ok(());
    }
    // A granule of the arena is larger than its buffer.
    let unit = if world.setup.separate == 1 { 1 } else { 2 << 20 };
    for (bytes, has_failed) in memory.pieces(world.setup.tensorflow == 0, world.site.any_stuck()) {
        let around = bytes.start / unit * unit..bytes.end.next_multiple_of(unit);
        if !has_failed && !world.site.may_stay(&around) {
            return Err(format!("{} B stay pinned after the end without a reason", bytes.len()));
        }
    }
    Ok(())
}
