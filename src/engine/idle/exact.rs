//! TensorFlow's order under one lock: the coat around the exact store.

use super::{Aftermath, Figures};
use crate::engine::block::Block;
use crate::engine::idle::exact_store::ExactStore;
use crate::policy::{self, Check, Window};
use crate::size_class::Class;
use crate::sync::plain::Mutex;

/// Idle blocks in the order of their puts.
#[derive(Debug)]
pub(in crate::engine) struct ExactIdle {
    /// Limit 0: nothing is pooled, so nothing is counted in windows, evicted or checked.
    pools: bool,
    auto_resize: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    store: ExactStore<Block>,
    limit: u64,
    bytes: u64,
    window: Window,
    /// All windows before this one.
    before: Window,
    unpooled: Window,
    reclaimed: u64,
    checks: u64,
    raises: u64,
    sealed: bool,
}

impl ExactIdle {
    pub(in crate::engine) fn new(limit: u64, auto_resize: bool) -> Self {
        let state = State {
            store: ExactStore::new(),
            limit,
            bytes: 0,
            window: Window::default(),
            before: Window::default(),
            unpooled: Window::default(),
            reclaimed: 0,
            checks: 0,
            raises: 0,
            sealed: false,
        };
        Self { pools: limit != 0, auto_resize, state: Mutex::new(state) }
    }

    pub(super) fn take(&self, class: Class) -> Option<Block> {
        let mut state = self.state.lock();
        let block = state.store.take(class.bytes)?;
        state.window.get_from_pool += 1;
        state.bytes -= block.held_bytes();
        Some(block)
    }

    /// TensorFlow's put: count, evict while the limit is reached, check, then keep.
    pub(super) fn put(&self, block: Block, _now_us: u64) -> Aftermath {
        let mut state = self.state.lock();
        if !self.pools {
            state.unpooled.put += 1;
            return Aftermath { unkept: Some(block), ..Aftermath::default() };
        }
        state.window.put += 1;
        if state.sealed {
            return Aftermath { unkept: Some(block), ..Aftermath::default() };
        }
        let mut aftermath = Aftermath::default();
        if state.store.len() as u64 >= state.limit {
            aftermath.victim = state.oldest();
            state.window.evicted += 1;
            aftermath.check = state.check_if_due(self.auto_resize);
        }
        state.bytes += block.held_bytes();
        state.store.put(block.class().bytes, block);
        aftermath
    }

    pub(super) fn count_allocated(&self) {
        let mut state = self.state.lock();
        let window = if self.pools { &mut state.window } else { &mut state.unpooled };
        window.allocated += 1;
    }

    pub(super) fn reclaim(&self) -> Option<Block> {
        let mut state = self.state.lock();
        let block = state.oldest();
        state.reclaimed += u64::from(block.is_some());
        block
    }

    pub(super) fn clear(&self) -> Vec<Block> {
        let mut state = self.state.lock();
        state.begin_window();
        state.drain()
    }

    pub(super) fn seal(&self) -> Vec<Block> {
        let mut state = self.state.lock();
        state.sealed = true;
        state.drain()
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.state.lock().sealed
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    pub(super) fn figures(&self) -> Figures {
        let state = self.state.lock();
        Figures {
            window: state.window,
            total: state.before + state.window + state.unpooled,
            limit: state.limit,
            buffers: state.store.len() as u64,
            bytes: state.bytes,
            reclaimed: state.reclaimed,
            checks: state.checks,
            raises: state.raises,
            ..Figures::default()
        }
    }
}

impl State {
    fn oldest(&mut self) -> Option<Block> {
        let block = self.store.evict()?;
        self.bytes -= block.held_bytes();
        Some(block)
    }

    fn drain(&mut self) -> Vec<Block> {
        self.bytes = 0;
        self.store.drain()
    }

    fn check_if_due(&mut self, auto_resize: bool) -> Option<Check> {
        let window = self.window;
        window.check_is_due().then(|| {
            let check = policy::check(window, self.limit, auto_resize);
            self.checks += 1;
            if let Some(limit) = check.raised_to {
                self.limit = limit;
                self.raises += 1;
                self.begin_window();
            }
            check
        })
    }

    fn begin_window(&mut self) {
        self.before = self.before + std::mem::take(&mut self.window);
    }
}
