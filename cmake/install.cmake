# SPDX-License-Identifier: Apache-2.0
# Installed: the header, both libraries, and what find_package(moecl) and pkg-config need.
include(CMakePackageConfigHelpers)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/moecl)
install(TARGETS moecl moecl_static EXPORT moeclTargets)
install(FILES ${PROJECT_SOURCE_DIR}/include/moe.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT moeclTargets NAMESPACE moecl:: DESTINATION ${package_folder})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moeclConfig.cmake.in
  ${PROJECT_BINARY_DIR}/moeclConfig.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moeclConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moeclConfig.cmake ${PROJECT_BINARY_DIR}/moeclConfigVersion.cmake
  DESTINATION ${package_folder})

# Paths from the prefix, so that an installed tree can be moved.
file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/moecl.pc.in ${PROJECT_BINARY_DIR}/moecl.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moecl.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
