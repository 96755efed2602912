//! DLPack: its structures as in `dlpack.h`, and the capsule that contains one.
#![allow(unsafe_code)] // Hands structures to C code and frees them.

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::memory::View;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
/// `kDLUInt`.
const UNSIGNED: u8 = 1;

/// Device types with which a buffer can be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Device {
    /// `kDLCPU`.
    Cpu = 1,
    /// `kDLCUDAHost`.
    CudaHost = 3,
}

impl Device {
    pub(crate) fn of(kind: i32) -> PyResult<Self> {
        match kind {
            1 => Ok(Self::Cpu),
            3 => Ok(Self::CudaHost),
            _ => Err(PyBufferError::new_err(format!(
                "a buffer cannot be exported as DLPack device type {kind}: use 1 (kDLCPU) or 3 (kDLCUDAHost), and copy"
            ))),
        }
    }
}

#[repr(C)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// Owns the data of an exported structure.
struct Context {
    view: View,
    shape: [i64; 1],
    strides: [i64; 1],
}

/// Returns the bytes of `view` as a tensor, and its context, which the deleter of the structure must free.
fn tensor(view: View, device: Device) -> (DlTensor, *mut c_void) {
    let shape = [i64::try_from(view.memory().len).unwrap_or(i64::MAX)];
    let context = Box::leak(Box::new(Context { view, shape, strides: [1] }));
    let data = if shape == [0] { ptr::null_mut() } else { context.view.memory().pointer().cast() };
    let tensor = DlTensor {
        data,
        device: DlDevice { kind: device as i32, id: 0 },
        ndim: 1,
        dtype: DlDataType { code: UNSIGNED, bits: 8, lanes: 1 },
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    (tensor, ptr::from_mut(context).cast())
}

/// # Safety
///
/// `context` comes from [`tensor`], and nothing else uses it.
unsafe fn free_context(context: *mut c_void) {
    // SAFETY: `context` was leaked from a box of this type, and nothing else uses it, as the caller promises.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
}

/// # Safety
///
/// `managed` comes from [`capsule`], and this is its last use.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: `managed` was leaked from a box of this type, and this is its last use, as the caller promises.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: the context comes from `tensor`, and only this structure used it.
    unsafe { free_context(managed.context) };
}

/// # Safety
///
/// `managed` comes from [`capsule`], and this is its last use.
unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: `managed` was leaked from a box of this type, and this is its last use, as the caller promises.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: the context comes from `tensor`, and only this structure used it.
    unsafe { free_context(managed.context) };
}

/// Frees the structure of a capsule that was not imported. Importers rename the capsule.
///
/// # Safety
///
/// `capsule` comes from [`capsule`], and is being destroyed.
unsafe extern "C" fn end_capsule(capsule: *mut ffi::PyObject) {
    for name in [PLAIN, VERSIONED] {
        // SAFETY: `capsule` is a live object, and the name is a C string.
        if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
            continue;
        }
        // SAFETY: the capsule has this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) };
        if name == PLAIN {
            // SAFETY: a capsule of this name owns a structure of this type, and ends with this call.
            unsafe { delete(managed.cast()) };
        } else {
            // SAFETY: a capsule of this name owns a structure of this type, and ends with this call.
            unsafe { delete_versioned(managed.cast()) };
        }
        return;
    }
}

/// Returns a capsule with the bytes of `view`.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    view: View,
    device: Device,
    has_version: bool,
) -> PyResult<Bound<'py, PyCapsule>> {
    let (tensor, context) = tensor(view, device);
    let (managed, name): (*mut c_void, _) = if has_version {
        let (version, deleter) = ([1, 0], Some(delete_versioned as _));
        (Box::into_raw(Box::new(ManagedVersioned { version, context, deleter, flags: 0, tensor })).cast(), VERSIONED)
    } else {
        (Box::into_raw(Box::new(Managed { tensor, context, deleter: Some(delete) })).cast(), PLAIN)
    };
    // SAFETY: the pointer is not null, the name is a static C string, and the destructor handles both names.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(end_capsule)) };
    // SAFETY: `capsule` is a new reference, or null with an exception set. If it is null, Python is out of memory, and the
    // structure leaks.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) }?;
    Ok(capsule.cast_into()?)
}
