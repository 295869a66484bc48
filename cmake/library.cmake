# SPDX-License-Identifier: Apache-2.0
# The library, compiled once: libmoecl.so and libmoecl.a, and the objects for tests that look inside.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)

file(GLOB_RECURSE library_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cc)
if(NOT MOE_CUDA_ENABLED)
  list(FILTER library_sources EXCLUDE REGEX "/src/transport/cuda_ipc/")
endif()
set(library_dependencies OpenSSL::Crypto Threads::Threads ${CMAKE_DL_LIBS})
if(MOE_CUDA_ENABLED AND cuda_sources)
  list(APPEND library_dependencies CUDA::cudart_static)
endif()

add_library(moecl_objects OBJECT ${library_sources} ${cuda_sources})
set_target_properties(moecl_objects PROPERTIES
  POSITION_INDEPENDENT_CODE ON
  C_VISIBILITY_PRESET hidden
  CXX_VISIBILITY_PRESET hidden
  CUDA_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(moecl_objects PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(moecl_objects PUBLIC ${library_dependencies})
if(MOE_CUDA_ENABLED)
  target_compile_definitions(moecl_objects PUBLIC MOE_HAVE_CUDA=1)
  # For cuda.h. Only headers: libcuda is opened at run time.
  target_include_directories(moecl_objects SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
endif()
if(MOE_MUTANT)
  # PUBLIC: tests instantiate protocol templates too.
  target_compile_definitions(moecl_objects PUBLIC MOE_MUTANT_${MOE_MUTANT})
endif()

add_library(moecl SHARED $<TARGET_OBJECTS:moecl_objects>)
add_library(moecl_static STATIC $<TARGET_OBJECTS:moecl_objects>)
add_library(moecl::moecl ALIAS moecl)
add_library(moecl::static ALIAS moecl_static)
foreach(library moecl moecl_static)
  set_target_properties(${library} PROPERTIES OUTPUT_NAME moecl LINKER_LANGUAGE CXX)
  target_include_directories(${library} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${library} PRIVATE ${library_dependencies})
endforeach()
set_target_properties(moecl PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/src/moecl.map INSTALL_RPATH "")
set_target_properties(moecl_static PROPERTIES EXPORT_NAME static)
# The rendezvous thread and OpenSSL's exit handlers must still find their code after a dlclose.
target_link_options(moecl PRIVATE -Wl,-z,nodelete)
target_link_options(moecl PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/src/moecl.map)
if(NOT MOE_SANITIZE)
  # Sanitizer run times may be left for the program to bring.
  target_link_options(moecl PRIVATE -Wl,--no-undefined)
endif()
