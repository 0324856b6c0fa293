# find_package(torch_marlin_metal) defines the target torch_marlin_metal::torch_marlin_metal: PyTorch with the
# operators torch.ops.torch_marlin_metal.*, without Python. Put this folder and PyTorch's into CMAKE_PREFIX_PATH.
include("${CMAKE_CURRENT_LIST_DIR}/built_for.cmake") # TORCH_MARLIN_METAL_BUILT_FOR: a version of torch
include(CMakeFindDependencyMacro)
find_dependency(Torch)

string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_marlin_metal_needs "${TORCH_MARLIN_METAL_BUILT_FOR}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_marlin_metal_has "${Torch_VERSION}")
if(NOT _torch_marlin_metal_has STREQUAL _torch_marlin_metal_needs)
  set(torch_marlin_metal_FOUND FALSE)
  string(CONCAT torch_marlin_metal_NOT_FOUND_MESSAGE
    "torch_marlin_metal: the library was built for torch ${TORCH_MARLIN_METAL_BUILT_FOR}, but CMake found torch "
    "${Torch_VERSION}. Install torch ${_torch_marlin_metal_needs}, or build the package for this torch.")
  return()
endif()

if(NOT TARGET torch_marlin_metal::torch_marlin_metal)
  add_library(torch_marlin_metal::torch_marlin_metal INTERFACE IMPORTED)
  set(_torch_marlin_metal_lib "${CMAKE_CURRENT_LIST_DIR}/lib")
  if(APPLE)
    set(_torch_marlin_metal_link "${_torch_marlin_metal_lib}/libtorch_marlin_metal.dylib")
  else()
    # A program that runs an exported model calls no function of the library, so a linker would drop the library.
    string(CONCAT _torch_marlin_metal_link "-Wl,--push-state,--no-as-needed,"
      "\"${_torch_marlin_metal_lib}/libtorch_marlin_metal.so\",--pop-state")
  endif()
  set_target_properties(torch_marlin_metal::torch_marlin_metal PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/include"
    INTERFACE_LINK_LIBRARIES "${_torch_marlin_metal_link};${TORCH_LIBRARIES}"
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,${_torch_marlin_metal_lib}"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
