//! Virtual host memory of the driver: addresses, physical granules, and what is mapped where.
//!
//! The types and numbers are ours, as in the driver's header, and the functions are found by name: bindings older than
//! CUDA 12.2 have neither, and later ones changed the shape of a location twice. Results come back as numbers, since an
//! enumeration filled from outside must not meet a value that it does not know.
//!
//! Never decides what is mapped, and remembers nothing.

use std::ffi::c_int;
use std::fmt;

/// `CUmemGenericAllocationHandle`: one physical granule.
pub(crate) type Handle = u64;

/// Numbers of `CUdevice_attribute`.
pub(crate) mod attribute {
    use std::ffi::c_int;

    pub(crate) const REGISTERS_HOST_MEMORY: c_int = 99;
    pub(crate) const VIRTUAL_MEMORY: c_int = 102;
    pub(crate) const HOST_NUMA_ID: c_int = 134;
    pub(crate) const HOST_NUMA_VIRTUAL_MEMORY: c_int = 141;
}

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

impl Location {
    pub(crate) fn device(id: c_int) -> Self {
        Self { kind: 1, id }
    }

    pub(crate) fn host_node(id: c_int) -> Self {
        Self { kind: 3, id }
    }
}

/// `CUmemAllocationProp`: page-locked, shared with nobody.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

impl Properties {
    fn pinned(location: Location) -> Self {
        Self { kind: 1, handle_types: 0, location, windows: 0, flags: [0; 8] }
    }
}

/// `CUmemAccessDesc`: reads and writes from one place.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    location: Location,
    flags: c_int,
}

impl Access {
    pub(crate) fn read_write(location: Location) -> Self {
        Self { location, flags: 3 }
    }
}

// As the header has them since CUDA 10.2.
const _: () = assert!(size_of::<Location>() == 8 && size_of::<Access>() == 12);
const _: () = assert!(size_of::<Properties>() == 32 && align_of::<Properties>() == 8);

/// What the driver answered instead of success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) call: &'static str,
    pub(crate) code: c_int,
}

impl Refused {
    /// No context is current on this thread.
    pub(crate) fn wants_a_context(self) -> bool {
        self.code == 201
    }
}

/// The error's name, as far as these calls give it.
impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.code {
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            208 => "CUDA_ERROR_ALREADY_MAPPED",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            999 => "CUDA_ERROR_UNKNOWN",
            code => return write!(f, "CUDA error {code}"),
        })
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// The driver's functions, once found.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct VmmApi {
            $($field: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl VmmApi {
            /// Finds them all, or names the first that this driver does not have.
            pub(crate) fn find() -> Result<Self, &'static str> {
                Ok(Self {$(
                    $field: {
                        let name = concat!(stringify!($name), "\0");
                        let name = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).map_err(|_| stringify!($name))?;
                        let found = super::symbol(name).ok_or(stringify!($name))?;
                        // SAFETY: the driver exports this name with these arguments (its header), all of them passed
                        // as C passes them, and is never unloaded.
                        unsafe {
                            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> c_int>(
                                found.as_ptr(),
                            )
                        }
                    },
                )*})
            }

            $($(#[$doc])*
            ///
            /// # Safety
            ///
            /// What the driver's manual says of this call.
            unsafe fn $field(&self, $($arg: $type),*) -> Result<(), Refused> {
                // SAFETY: the caller's promise.
                match unsafe { (self.$field)($($arg),*) } {
                    0 => Ok(()),
                    code => Err(Refused { call: stringify!($name), code }),
                }
            })*
        }
    };
}

functions! {
    /// Addresses without memory.
    reserve_call = cuMemAddressReserve(out: *mut u64, bytes: usize, alignment: usize, wish: u64, flags: u64);
    /// Addresses go back.
    unreserve_call = cuMemAddressFree(address: u64, bytes: usize);
    /// What lengths and addresses must be multiples of.
    granularity_call =
        cuMemGetAllocationGranularity(out: *mut usize, properties: *const Properties, recommended: c_int);
    /// Memory without an address.
    create_call = cuMemCreate(out: *mut Handle, bytes: usize, properties: *const Properties, flags: u64);
    /// The memory goes once it is mapped nowhere.
    release_call = cuMemRelease(granule: Handle);
    /// Memory gets an address.
    map_call = cuMemMap(address: u64, bytes: usize, offset: usize, granule: Handle, flags: u64);
    /// Memory loses its address.
    unmap_call = cuMemUnmap(address: u64, bytes: usize);
    /// Who may read and write it.
    access_call = cuMemSetAccess(address: u64, bytes: usize, wanted: *const Access, count: usize);
}

impl VmmApi {
    /// Smallest piece of memory at `location`.
    pub(crate) fn granularity(&self, location: Location) -> Result<usize, Refused> {
        let mut bytes = 0;
        let properties = Properties::pinned(location);
        // SAFETY: room for one number, and properties that live as long as the call.
        unsafe { self.granularity_call(&raw mut bytes, &raw const properties, 0) }?;
        Ok(bytes)
    }

    /// Reserves `bytes` addresses at a multiple of `alignment`.
    pub(crate) fn reserve(&self, bytes: usize, alignment: usize) -> Result<usize, Refused> {
        let mut address = 0;
        // SAFETY: room for one address; the driver chooses free ones.
        unsafe { self.reserve_call(&raw mut address, bytes, alignment, 0, 0) }?;
        // The driver runs on 64-bit machines only.
        Ok(usize::try_from(address).unwrap_or(0))
    }

    /// # Safety
    ///
    /// Reserved with this length, with nothing mapped and nobody using them.
    pub(crate) unsafe fn unreserve(&self, address: usize, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.unreserve_call(address as u64, bytes) }
    }

    /// A granule of `bytes` at `location`. A context is current.
    pub(crate) fn create(&self, bytes: usize, location: Location) -> Result<Handle, Refused> {
        let mut granule = 0;
        let properties = Properties::pinned(location);
        // SAFETY: room for one handle, and properties that live as long as the call.
        unsafe { self.create_call(&raw mut granule, bytes, &raw const properties, 0) }?;
        Ok(granule)
    }

    /// # Safety
    ///
    /// Of `create`, and not released.
    pub(crate) unsafe fn release(&self, granule: Handle) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.release_call(granule) }
    }

    /// # Safety
    ///
    /// The `bytes` addresses are reserved by the caller and have nothing behind them; `granule` is that long.
    pub(crate) unsafe fn map(&self, address: usize, bytes: usize, granule: Handle) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.map_call(address as u64, bytes, 0, granule, 0) }
    }

    /// # Safety
    ///
    /// Exactly what one `map` mapped, used by nobody.
    pub(crate) unsafe fn unmap(&self, address: usize, bytes: usize) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { self.unmap_call(address as u64, bytes) }
    }

    /// # Safety
    ///
    /// The `bytes` at `address` are whole granules, mapped by the caller.
    pub(crate) unsafe fn allow(&self, address: usize, bytes: usize, wanted: &[Access]) -> Result<(), Refused> {
        // SAFETY: the caller's promise, and as many wishes as counted.
        unsafe { self.access_call(address as u64, bytes, wanted.as_ptr(), wanted.len()) }
    }
}
